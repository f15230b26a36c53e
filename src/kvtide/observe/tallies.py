"""The tallies of a device as others read them: counters, histograms, events; nothing is locked."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtide.ledger import Snapshot
from kvtide.observe import tally as t
from kvtide.observe.tally import CAUSE_NAMES, KIND_NAMES, VERB_NAMES, Owner

__all__ = [
    "Counted",
    "Histogram",
    "Noted",
    "Reading",
    "leftovers",
    "live_owners",
    "read_tally",
    "sweep",
    "wall_ns",
]


class Counted(NamedTuple):
    """How many times, and bytes in all."""

    times: int
    size_bytes: int


class Histogram(NamedTuple):
    """Durations: their sum, and how many were in each bucket, at most 1 us, 2 us, 4 us...

    The last bucket has all that were longer.
    """

    sum_ns: int
    buckets: tuple[int, ...]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.buckets)


class Noted(NamedTuple):
    """One event. `time_ns` is monotonic; `detail` is nanoseconds waited, or a number of splits."""

    number: int
    time_ns: int
    kind: str
    cause: str
    size_bytes: int
    detail: int


class Reading(NamedTuple):
    """A tally as it was: what never was is left out. `lost` events were overwritten before."""

    pid: int
    about: str
    counts: dict[tuple[str, str], Counted]
    times: dict[str, Histogram]
    head: int
    events: tuple[Noted, ...]
    lost: int


def read_tally(path: Path, after: int = 0) -> Reading | None:
    """Read a tally with the events that came after one number; None where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        head = _head(fd)
        raw = os.pread(fd, t.FILE_BYTES, 0)
        newest = _head(fd)
    finally:
        os.close(fd)
    if len(raw) != t.FILE_BYTES:
        return None
    words = memoryview(raw).cast("q")
    if words[t.T_MAGIC] != t.MAGIC or words[t.T_LAYOUT] != t.LAYOUT:
        return None
    # The event that is being written now takes the place of the oldest one.
    oldest = max(after, newest + 1 - t.EVENTS)
    events = []
    for number in range(oldest, head):
        at = t.EVENTS_BYTES_AT + number % t.EVENTS * t.EVENT.size
        event = t.EVENT.unpack_from(raw, at)
        if event[0] == number + 1:
            events.append(_noted(*event))
    about = raw[t.T_ABOUT * t.WORD_BYTES :][: t.ABOUT_BYTES].rstrip(b"\0").decode(errors="replace")
    return Reading(
        words[t.T_PID],
        about,
        _counts(words),
        _times(words),
        head,
        tuple(events),
        max(0, oldest - after),
    )


def _head(fd: int) -> int:
    word = os.pread(fd, t.WORD_BYTES, t.T_HEAD * t.WORD_BYTES)
    return int.from_bytes(word, "little")


def _noted(number: int, time_ns: int, kind: int, cause: int, size: int, detail: int) -> Noted:
    return Noted(number, time_ns, _name(KIND_NAMES, kind), _name(CAUSE_NAMES, cause), size, detail)


def _name(names: tuple[str, ...], number: int) -> str:
    """By a later version there may be more than this one knows."""
    return names[number] if 0 <= number < len(names) else f"unknown-{number}"


def _counts(words: memoryview) -> dict[tuple[str, str], Counted]:
    table = words[t.COUNTS_AT : t.HISTOGRAMS_AT].tolist()
    return {
        (_name(KIND_NAMES, i // t.CAUSES), _name(CAUSE_NAMES, i % t.CAUSES)): Counted(
            table[2 * i], table[2 * i + 1]
        )
        for i in range(t.KINDS * t.CAUSES)
        if table[2 * i]
    }


def _times(words: memoryview) -> dict[str, Histogram]:
    found = {}
    for verb in range(t.HISTOGRAMS):
        at = t.HISTOGRAMS_AT + verb * t.HISTOGRAM_WORDS
        sum_ns, *buckets = words[at : at + t.HISTOGRAM_WORDS].tolist()
        if any(buckets):
            found[_name(VERB_NAMES, verb)] = Histogram(sum_ns, tuple(buckets))
    return found


def live_owners(snapshot: Snapshot) -> set[Owner]:
    """Who may have a tally."""
    return {Owner.of_key("engine", i.key) for i in snapshot.instances} | {
        Owner.of_key("rank", pool.key) for i in snapshot.instances for pool in i.pools
    }


def leftovers(snapshot: Snapshot, listed: dict[Owner, Path]) -> list[Path]:
    """Those of the listed tallies whose records have ended. List first, then take the snapshot."""
    live = live_owners(snapshot)
    return sorted(path for owner, path in listed.items() if owner not in live)


def sweep(listed: dict[Owner, Path], snapshot: Snapshot) -> int:
    """Remove the tallies of the dead; how many. The list must be older than the snapshot."""
    removed = 0
    for path in leftovers(snapshot, listed):
        with suppress(OSError):
            path.unlink()
            removed += 1
    return removed


def wall_ns(monotonic_ns: int) -> int:
    """A monotonic time as nanoseconds since 1970."""
    return monotonic_ns + time.time_ns() - time.monotonic_ns()
