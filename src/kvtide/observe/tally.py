"""A process's own counters and last events, in a file beside the ledger, written without a lock.

One process and thread writes a tally; anybody may read it at any time, and nothing is decided by
it. A word is 8 bytes and never tears; an event is whole once the head counts it. A tally is named
by the record whose owner writes it, so it is dead when that record's generation is.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import struct
import time
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from kvtide.ledger.directory import file_mode

__all__ = ["Cause", "Kind", "Owner", "Role", "Tally", "Verb", "tallies_of"]

_log = logging.getLogger(__name__)

Role = Literal["engine", "rank"]


class Kind:
    """What happened. Bytes are those it was about, on one device."""

    GROW: Final = 0
    SHRINK: Final = 1
    SPLIT: Final = 2
    REFUSE: Final = 3
    MISS: Final = 4
    WAIT: Final = 5
    RESUME: Final = 6
    EVICT: Final = 7
    QUARANTINE: Final = 8
    PREEMPT: Final = 9


class Cause:
    """Why it happened."""

    START: Final = 0
    NEED: Final = 1
    AHEAD: Final = 2
    OTHERS: Final = 3
    LIMIT: Final = 4
    IDLE: Final = 5
    SURPLUS: Final = 6
    BUDGET: Final = 7
    BUSY: Final = 8
    RETIRED: Final = 9
    DEVICE: Final = 10
    ALLOCATION: Final = 11
    TRIM: Final = 12
    MIN: Final = 13
    PRIORITY: Final = 14
    RESERVATION: Final = 15
    HEADROOM: Final = 16


class Verb:
    """What is timed, each in a histogram: a device's calls, and waits for memory."""

    CREATE: Final = 0
    MAP: Final = 1
    UNMAP: Final = 2
    RELEASE: Final = 3
    ZERO: Final = 4
    COPY: Final = 5
    WAIT: Final = 6


KIND_NAMES: Final = (
    *("grow", "shrink", "split", "refuse", "miss", "wait", "resume", "evict", "quarantine"),
    "preempt",
)
CAUSE_NAMES: Final = (
    *("start", "need", "ahead", "others", "limit", "idle", "surplus", "budget", "busy", "retired"),
    *("device", "allocation", "trim", "min", "priority", "reservation"),
    "headroom",
)
VERB_NAMES: Final = ("create", "map", "unmap", "release", "zero", "copy", "wait")

MAGIC: Final = int.from_bytes(b"kvtally\x00", "little")
LAYOUT: Final = 1
WORD_BYTES: Final = 8

T_MAGIC: Final = 0
T_LAYOUT: Final = 1
T_PID: Final = 2
T_HEAD: Final = 3  # events written ever
T_OPENED_NS: Final = 4
T_ABOUT: Final = 8  # a text for people, of so many bytes
ABOUT_BYTES: Final = 64

KINDS: Final = 16
CAUSES: Final = 32
COUNTS_AT: Final = 16
# A histogram: the sum in ns, then buckets: at most 1 us, 2 us, 4 us and so on, the last one all.
BUCKETS: Final = 30
HISTOGRAM_WORDS: Final = BUCKETS + 2
HISTOGRAMS: Final = 8
HISTOGRAMS_AT: Final = COUNTS_AT + 2 * KINDS * CAUSES
EVENTS_AT: Final = HISTOGRAMS_AT + HISTOGRAMS * HISTOGRAM_WORDS
# An event: its number from 1, when (monotonic ns), kind, cause, bytes, detail.
EVENT: Final = struct.Struct("6q")
EVENTS: Final = 1024
EVENTS_BYTES_AT: Final = EVENTS_AT * WORD_BYTES
FILE_BYTES: Final = EVENTS_BYTES_AT + EVENTS * EVENT.size

_NAME: Final = re.compile(r"(.+)\.(\d+)\.([0-9a-f]+)\.(engine|rank)\.tally")
_WORD: Final = struct.Struct("q")
_PAIR: Final = struct.Struct("2q")
_EVENT_BYTES: Final = EVENT.size
_HEAD_BYTES_AT: Final = T_HEAD * WORD_BYTES
_COUNTS_BYTES_AT: Final = COUNTS_AT * WORD_BYTES
_TIMES_BYTES_AT: Final = HISTOGRAMS_AT * WORD_BYTES
_BOUNDS_NS: Final = [1000 << bucket for bucket in range(BUCKETS)]
# Bound once: these run on the path of an engine's steps.
_pack: Final = EVENT.pack_into
_pack_word: Final = _WORD.pack_into
_pack_pair: Final = _PAIR.pack_into
_now: Final = time.monotonic_ns


class Owner(NamedTuple):
    """Whose tally it is: an instance's record (`engine`, its scheduler) or a pool's (`rank`)."""

    role: Role
    slot: int
    generation: int

    @classmethod
    def of_key(cls, role: Role, key: str) -> Owner:
        """From the key of an instance or an account."""
        slot, _, generation = key.partition(":")
        return cls(role, int(slot), int(generation))

    @property
    def key(self) -> str:
        """The key of the record."""
        return f"{self.slot}:{self.generation}"

    def path(self, ledger: Path) -> Path:
        """The file, beside a ledger."""
        return ledger.parent / f"{ledger.stem}.{self.slot}.{self.generation:x}.{self.role}.tally"


def tallies_of(ledger: Path) -> dict[Owner, Path]:
    """The tallies that lie beside a ledger, of the living and of the dead."""
    found = {}
    for name in os.listdir(ledger.parent):  # noqa: PTH208 - it is only names
        match = _NAME.fullmatch(name)
        if match and match[1] == ledger.stem:
            role: Role = "engine" if match[4] == "engine" else "rank"
            found[Owner(role, int(match[2]), int(match[3], 16))] = ledger.parent / name
    return found


class Tally:
    """Where one process counts. From one thread.

    Parameters
    ----------
    ledger
        The ledger that it lies beside.
    owner
        The record of this process's own that it is named by.
    about
        What else to tell people, in a few words.

    Notes
    -----
    It never fails: where the file cannot be made, it counts unseen.
    """

    def __init__(self, ledger: Path, owner: Owner, about: str = "") -> None:
        self.path: Path | None = owner.path(ledger)
        try:
            self._map = _make(self.path)
        except OSError as error:
            _log.warning("kvtide: counters of this process stay unseen: %s", error)
            self.path = None
            self._map = mmap.mmap(-1, FILE_BYTES)
        # What is in the file, kept here too: reading words back costs more than the rest.
        self._counts = [0] * (2 * KINDS * CAUSES)
        self._times = [0] * (HISTOGRAMS * HISTOGRAM_WORDS)
        self._head = 0
        self._put(T_PID, os.getpid())
        self._put(T_OPENED_NS, _now())
        text = about.encode()[:ABOUT_BYTES]
        at = T_ABOUT * WORD_BYTES
        self._map[at : at + len(text)] = text
        self._put(T_LAYOUT, LAYOUT)
        self._put(T_MAGIC, MAGIC)

    def _put(self, word: int, value: int) -> None:
        _WORD.pack_into(self._map, word * WORD_BYTES, value)

    def count(self, kind: int, cause: int, size_bytes: int, more: int = 1) -> None:
        """Count only, once or so many times: for what may happen at every step."""
        counts, at = self._counts, 2 * (kind * CAUSES + cause)
        counts[at] = times = counts[at] + more
        counts[at + 1] = sum_bytes = counts[at + 1] + size_bytes
        _pack_pair(self._map, _COUNTS_BYTES_AT + 8 * at, times, sum_bytes)

    def note(self, kind: int, cause: int, size_bytes: int = 0, detail: int = 0) -> None:
        """Count, and leave an event."""
        counts, at = self._counts, 2 * (kind * CAUSES + cause)
        counts[at] = times = counts[at] + 1
        counts[at + 1] = sum_bytes = counts[at + 1] + size_bytes
        _pack_pair(self._map, _COUNTS_BYTES_AT + 8 * at, times, sum_bytes)
        head = self._head
        place = EVENTS_BYTES_AT + head % EVENTS * _EVENT_BYTES
        self._head = head = head + 1
        _pack(self._map, place, head, _now(), kind, cause, size_bytes, detail)
        _pack_word(self._map, _HEAD_BYTES_AT, head)

    def time(self, verb: int, *took_ns: int) -> None:
        """Put durations into a histogram."""
        times, at = self._times, verb * HISTOGRAM_WORDS
        times[at] += sum(took_ns)
        words = [at + 1 + bisect_left(_BOUNDS_NS, took) for took in took_ns]
        for word in words:
            times[word] += 1
        for word in {at, *words}:
            _pack_word(self._map, _TIMES_BYTES_AT + 8 * word, times[word])

    def close(self) -> None:
        """Remove the file."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()
            self.path = None
        # What still counts meanwhile counts unseen.
        self._map.close()
        self._map = mmap.mmap(-1, FILE_BYTES)


def _make(path: Path) -> mmap.mmap:
    """A new file of zeros, with all its memory, since touching what a full disk lacks kills."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, file_mode(path.parent.stat()))
        os.posix_fallocate(fd, 0, FILE_BYTES)
        return mmap.mmap(fd, FILE_BYTES)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
