"""One coherent picture of a ledger, taken without its lock."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.creation import open_description, spec_of, wait_begun, why_unreadable
from kvtide.ledger.damage import damage
from kvtide.ledger.directory import check_directory
from kvtide.ledger.holdings import headroom_of, is_silent
from kvtide.ledger.lease import is_leased
from kvtide.ledger.lock import ChangeLock
from kvtide.ledger.policy import backed_mins
from kvtide.ledger.records import (
    NON_KV_SOURCES,
    InstanceView,
    PoolFigures,
    PoolView,
    Snapshot,
    State,
    Terms,
)
from kvtide.ledger.retirement import live_instances, live_pools

__all__ = ["STATES", "Observer", "take_snapshot", "terms_of"]

STATES: Final = tuple(State)
_TRIES: Final = 100
_FIGURE_TRIES: Final = 10
_SHORT_NAPS: Final = 30
_NAP_S: Final = 100e-6
_LONG_NAP_S: Final = 1e-3
_MAKING_S: Final = 1.0
_STANDS_AFTER: Final = 60  # tries, so as many milliseconds


def _copy(raw: memoryview, words: memoryview) -> bytes:
    """The file at one moment.

    Raises
    ------
    LedgerBusyError
        It kept changing for a hundred tries.
    """
    stood, stood_for = -1, 0
    for attempt in range(_TRIES):
        before = words[w.H_SEQUENCE]
        copy = bytes(raw)
        if words[w.H_SEQUENCE] == before and not before & 1:
            return copy
        stood, stood_for = before, (stood_for + 1 if before == stood else 0)
        time.sleep(_NAP_S if attempt < _SHORT_NAPS else _LONG_NAP_S)
    if stood_for >= _STANDS_AFTER:
        # Odd and still: its writer has died or was stopped in the middle of a change. What it has
        # left so far is safe, and stands: that is the picture.
        return copy
    raise LedgerBusyError(
        f"the ledger kept changing under a hundred tries to read it; process "
        f"{words[w.H_HOLDER_PID]} changed it last. Try again"
    )


def take_snapshot(raw: memoryview, words: memoryview, leased: Callable[[int], bool]) -> Snapshot:
    """Read a ledger against its sequence. `leased` says whether the record at a word has a lease.

    Raises
    ------
    LedgerBusyError
        It kept changing.
    LedgerError
        It is damaged.
    """
    copy = _copy(raw, words)
    then = memoryview(copy).cast("q")
    why = damage(then)
    if why is not None:
        raise LedgerError(f"the ledger is damaged: {why}. End every engine of this device")
    pools: dict[int, list[PoolView]] = {}
    for slot in live_pools(then):
        at = w.pool_at(slot)
        pools.setdefault(then[at + w.P_INSTANCE], []).append(
            PoolView(
                key=f"{slot}:{then[at]}",
                name=w.get_text(copy, at + w.P_NAME, w.NAME_BYTES),
                rank=then[at + w.P_RANK],
                pid=then[at + w.P_PID],
                live=leased(at),
                charge_bytes=then[at + w.P_CHARGE],
                created_bytes=then[at + w.P_CREATED],
                released_bytes=then[at + w.P_RELEASED],
                blocks_total=then[at + w.P_BLOCKS_TOTAL],
                block_bytes=then[at + w.P_BLOCK_BYTES],
                figures=_figures(words, at),
            )
        )
    instances = []
    terms = {slot: terms_of(then, slot) for slot in live_instances(then)}
    headroom_bytes = sum(headroom_of(then, w.instance_at(slot)) for slot in terms)
    withheld_bytes = max(0, headroom_bytes - then[w.H_BEYOND])
    backed = backed_mins(
        [(slot, t.priority, t.min_bytes) for slot, t in terms.items()],
        budget_bytes=then[w.H_BUDGET] - withheld_bytes,
    )
    now_ns = time.monotonic_ns()
    for slot in terms:
        at = w.instance_at(slot)
        instances.append(
            InstanceView(
                key=f"{slot}:{then[at]}",
                name=w.get_text(copy, at + w.I_NAME, w.NAME_BYTES),
                pid=then[at + w.I_PID],
                state=STATES[then[at + w.I_STATE]] if leased(at) else State.DEAD,
                terms=terms[slot],
                revision=then[at + w.I_REVISION],
                wish_bytes=then[at + w.I_WISH],
                pools=tuple(pools.get(slot, ())),
                backed_min_bytes=backed[slot],
                deadline_ns=then[at + w.I_DEADLINE_NS],
                reserved_bytes=then[at + w.I_RESERVED],
                loaded_bytes=then[at + w.I_LOADED],
                non_kv_bytes=then[at + w.I_NON_KV],
                non_kv_source=NON_KV_SOURCES[then[at + w.I_NON_KV_SOURCE]],
                silent=is_silent(then, at, now_ns),
                headroom_taken_bytes=then[at + w.I_TAKEN],
            )
        )
    return Snapshot(
        spec=spec_of(copy),
        sequence=then[w.H_SEQUENCE],
        budget_bytes=max(0, then[w.H_BUDGET]),
        sampled_ns=then[w.H_SAMPLED_NS],
        free_sampled_bytes=then[w.H_FREE_SAMPLED],
        withheld_bytes=withheld_bytes,
        instances=tuple(instances),
    )


def terms_of(words: memoryview, slot: int) -> Terms:
    """An instance's terms as they are now."""
    at = w.instance_at(slot)
    limit_bytes = words[at + w.I_LIMIT]
    return Terms(
        limit_bytes=None if limit_bytes == w.NONE else limit_bytes,
        min_bytes=words[at + w.I_MIN],
        priority=words[at + w.I_PRIORITY],
        headroom_bytes=words[at + w.I_HEADROOM],
    )


def _figures(words: memoryview, at: int) -> PoolFigures:
    """A pool's figures, which its owner stores without the lock under a sequence of their own.

    After some tries they are taken as they are: their owner may have stopped half way, and nothing
    is decided by them.
    """
    first, last = at + w.P_BLOCKS_MAPPED, at + w.P_QUARANTINED + 1
    for _ in range(_FIGURE_TRIES):
        before = words[at + w.P_FIGURES_SEQUENCE]
        figures = PoolFigures(*words[first:last].tolist())
        if not before & 1 and words[at + w.P_FIGURES_SEQUENCE] == before:
            break
    return figures


class Observer:
    """A ledger opened for reading alone: changes nothing, and waits for nobody but its maker."""

    def __init__(self, path: Path) -> None:
        """Open and validate.

        Raises
        ------
        LedgerError
            There is no such ledger, or it cannot be trusted or read.
        """
        check_directory(path.parent)
        self._fd = open_description(path, write=False)
        with ExitStack() as undo:
            undo.callback(os.close, self._fd)
            why = why_unreadable(self._fd) and self._why_for_good()
            if why is not None:
                raise LedgerError(f"the ledger {path} cannot be read: {why}")
            try:
                self._map = mmap.mmap(self._fd, w.FILE_BYTES, prot=mmap.PROT_READ)
            except OSError as error:
                message = f"the ledger {path} cannot be mapped: {error.strerror}"
                raise LedgerError(message) from error
            undo.pop_all()
        self._raw = memoryview(self._map)
        self._words = self._raw.cast("q")
        self.path = path

    def _why_for_good(self) -> str | None:
        """Why it cannot be read once nobody is at making it, who holds its lock meanwhile."""
        wait_begun(self._fd)
        lock = ChangeLock(self._fd)
        if lock.acquire(_MAKING_S):
            lock.release()
        return why_unreadable(self._fd)

    def snapshot(self) -> Snapshot:
        """The ledger at one moment.

        Raises
        ------
        LedgerBusyError
            It kept changing.
        LedgerError
            It is damaged, or was cut.
        """
        if os.fstat(self._fd).st_size != w.FILE_BYTES:
            raise LedgerError(f"the ledger {self.path} was cut while it was read")
        return take_snapshot(
            self._raw, self._words, lambda word: is_leased(self._fd, word * w.WORD_BYTES)
        )

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            self._words.release()
            self._raw.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
