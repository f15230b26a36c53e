"""What one engine's scheduler notes of its memory, on each of its devices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvtide.errors import LedgerBusyError
from kvtide.ledger import Refusal
from kvtide.observe.logs import LOGGED, log_event
from kvtide.observe.tallies import sweep
from kvtide.observe.tally import CAUSE_NAMES, Cause, Kind, Owner, Tally, Verb, tallies_of
from kvtide.ranks.ranks import Member
from kvtide.ranks.seat import Seat

__all__ = ["Journal", "refusal_cause"]

_SUMMED_NS = 250_000_000
_REFUSALS = {name: CAUSE_NAMES.index(name) for name in ("budget", "limit", "busy", "retired")}


def refusal_cause(refusal: Refusal) -> int:
    """Why a ledger refused."""
    return _REFUSALS[refusal.reason]


def _sum(ranks: Sequence[int], bytes_of_shape: Sequence[int]) -> int:
    """Bytes of all ranks of one device."""
    if len(ranks) == 1:
        return ranks[0] * bytes_of_shape[0]
    return sum(n * size for n, size in zip(ranks, bytes_of_shape, strict=True))


class Journal:
    """One tally a device, and a line in the log for what matters.

    Parameters
    ----------
    seats
        By device UUID.
    members
        All ranks of the engine.
    block_bytes
        Of each shape.
    """

    def __init__(
        self, seats: Mapping[str, Seat], members: Sequence[Member], block_bytes: Sequence[int]
    ) -> None:
        self.name = next(iter(seats.values())).instance.name
        for seat in seats.values():
            listed = tallies_of(seat.ledger.path)
            with suppress(LedgerBusyError):  # the next one that starts sweeps
                sweep(listed, seat.ledger.snapshot())
        self._tallies = [
            (
                uuid,
                Tally(seat.ledger.path, Owner.of_key("engine", seat.instance.key)),
                [
                    sum(m.device_uuid == uuid and m.shape == shape for m in members)
                    for shape in range(len(block_bytes))
                ],
            )
            for uuid, seat in seats.items()
        ]
        self._block_bytes = block_bytes
        # Bytes of one block on all ranks of each device.
        self._of_block = [
            (tally, sum(n * size for n, size in zip(ranks, block_bytes, strict=True)))
            for _, tally, ranks in self._tallies
        ]
        self._waits_since_ns = 0
        # What may be at every step is summed here and counted a few times a second: the engine's
        # own evictions, and refusals while it waits, as times and bytes of each shape.
        self.evicted_blocks = 0
        self._again: dict[tuple[int, int], list[int]] = {}
        self._counted_ns = 0

    def note(self, kind: int, cause: int, bytes_of_shape: Sequence[int], detail: int = 0) -> None:
        """An event, with the bytes that a rank of each shape has part in.

        What is refused while the engine waits already is counted only: it may be at every step.
        """
        if self._waits_since_ns and (kind == Kind.MISS or kind == Kind.REFUSE):
            sums = self._again.get((kind, cause))
            if sums is None:
                sums = self._again[kind, cause] = [0] * (1 + len(self._block_bytes))
            sums[0] += 1
            for shape, size_bytes in enumerate(bytes_of_shape, 1):
                sums[shape] += size_bytes
            return
        for uuid, tally, ranks in self._tallies:
            size_bytes = _sum(ranks, bytes_of_shape)
            tally.note(kind, cause, size_bytes, detail)
            if (kind, cause) in LOGGED:
                log_event(self.name, uuid, kind, cause, size_bytes, detail)

    def evicted(self, cause: int, blocks: int) -> None:
        """Blocks of the prefix cache that were given up; counted only, without an event.

        Those whose place a new block takes the engine adds to `evicted_blocks`.
        """
        for tally, block_bytes in self._of_block:
            tally.count(Kind.EVICT, cause, blocks * block_bytes, blocks)

    def count_soon(self) -> None:
        """Count what was summed, if that was not done just now; for every step."""
        now_ns = time.monotonic_ns()
        if now_ns - self._counted_ns > _SUMMED_NS:
            self._counted_ns = now_ns
            self.count_now()

    def count_now(self) -> None:
        """Count what was summed."""
        if self.evicted_blocks:
            self.evicted(Cause.ALLOCATION, self.evicted_blocks)
            self.evicted_blocks = 0
        for (kind, cause), (times, *of_shape) in self._again.items():
            for _, tally, ranks in self._tallies:
                tally.count(kind, cause, _sum(ranks, of_shape), times)
        self._again.clear()

    def waits(self, bytes_of_device: Mapping[str, int]) -> None:
        """The engine waits for memory that others hold; again and again is one wait."""
        if self._waits_since_ns:
            return
        self._waits_since_ns = time.monotonic_ns()
        for uuid, tally, _ in self._tallies:
            tally.note(Kind.WAIT, Cause.NEED, bytes_of_device[uuid])
            log_event(self.name, uuid, Kind.WAIT, Cause.NEED, bytes_of_device[uuid], 0)

    def resumes(self) -> None:
        """It does not wait any more."""
        if not self._waits_since_ns:
            return
        waited_ns, self._waits_since_ns = time.monotonic_ns() - self._waits_since_ns, 0
        for uuid, tally, _ in self._tallies:
            tally.note(Kind.RESUME, Cause.NEED, 0, waited_ns)
            tally.time(Verb.WAIT, waited_ns)
            log_event(self.name, uuid, Kind.RESUME, Cause.NEED, 0, waited_ns)

    def close(self) -> None:
        """Remove the tallies."""
        for _, tally, _ in self._tallies:
            tally.close()
