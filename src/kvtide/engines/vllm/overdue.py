"""Requests that waited for memory longer than they may: which, and what would have helped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.ledger.explaining import explain
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.seat import Seat

__all__ = ["Overdue"]


class Overdue:
    """Since when the heads of the queue wait; told after every step that missed memory.

    Parameters
    ----------
    memory
        Of the engine.
    deadline_seconds
        How long a request may wait; None: for ever.
    """

    def __init__(
        self,
        memory: GrowingMemory[Any],
        deadline_seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._deadline = math.inf if deadline_seconds is None else deadline_seconds
        self._clock = clock
        self._since: dict[str, float] = {}

    def find(self, heads: Sequence[Any]) -> dict[str, str]:
        """Those of the requests that have waited too long, by id, and why they got nothing."""
        if math.isinf(self._deadline):
            return {}
        now = self._clock()
        self._since = {r.request_id: self._since.get(r.request_id, now) for r in heads}
        until = min(self._since.values(), default=now) + self._deadline
        self._memory.wait_until(int(until * 1e9))
        late = [r for r in heads if now - self._since[r.request_id] >= self._deadline]
        return {
            r.request_id: f"{r.num_tokens} tokens waited for memory for "
            f"{now - self._since[r.request_id]:.1f} s (KVTIDE_WAIT_DEADLINE): {self._why()}"
            for r in late
        }

    def forget(self) -> None:
        """Nobody waits."""
        self._since.clear()

    @property
    def left_seconds(self) -> float:
        """Until the first of those who wait is overdue; infinite without a deadline."""
        first = min(self._since.values(), default=math.inf)
        return max(0.001, first + self._deadline - self._clock())

    def _why(self) -> str:
        return "; ".join(map(_of_device, self._memory.seats.values()))


def _of_device(seat: Seat) -> str:
    name, asked_bytes = seat.instance.name, seat.instance.wish_bytes
    return explain(seat.ledger.snapshot(), name, asked_bytes)
