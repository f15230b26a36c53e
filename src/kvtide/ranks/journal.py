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

_REFUSALS = {name: CAUSE_NAMES.index(name) for name in ("budget", "limit", "busy", "retired")}


def refusal_cause(refusal: Refusal) -> int:
    """Why a ledger refused."""
    return _REFUSALS[refusal.reason]


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

    def note(self, kind: int, cause: int, bytes_of_shape: Sequence[int], detail: int = 0) -> None:
        """An event, with the bytes that a rank of each shape has part in.

        What is refused while the engine waits already is counted only: it may be at every step.
        """
        again = self._waits_since_ns and (kind == Kind.MISS or kind == Kind.REFUSE)
        for uuid, tally, ranks in self._tallies:
            if len(ranks) == 1:  # most often; this may be on the path of every step
                size_bytes = ranks[0] * bytes_of_shape[0]
            else:
                size_bytes = sum(n * size for n, size in zip(ranks, bytes_of_shape, strict=True))
            if again:
                tally.count(kind, cause, size_bytes)
                continue
            tally.note(kind, cause, size_bytes, detail)
            if (kind, cause) in LOGGED:
                log_event(self.name, uuid, kind, cause, size_bytes, detail)

    def evicted(self, cause: int, blocks: int) -> None:
        """Blocks of the prefix cache that were given up; counted only, the engine itself may at
        every step.
        """
        for tally, block_bytes in self._of_block:
            tally.count(Kind.EVICT, cause, blocks * block_bytes)

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
