"""Requests for which memory never comes, or not in time: they end with an error that says why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from kvtide.ledger.explaining import explain
from kvtide.ranks.seat import Seat

__all__ = ["Overdue", "end_request"]

_log = logging.getLogger("sglang.kvtide")


class Overdue:
    """Since when the head of the queue waits while nothing runs.

    Parameters
    ----------
    seat
        This rank's.
    deadline_seconds
        How long a request may wait; None: for ever.
    """

    def __init__(
        self,
        seat: Seat,
        deadline_seconds: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seat = seat
        self._deadline = deadline_seconds
        self._clock = clock
        self._head: str | None = None
        self._since = 0.0

    def is_late(self, head: Any) -> bool:
        """Whether this request has waited too long; asked whenever nothing can run."""
        if self._deadline is None:
            return False
        if head.rid != self._head:
            self._head, self._since = head.rid, self._clock()
        return self._clock() - self._since >= self._deadline

    def why_late(self, tokens: int) -> str:
        """What is said of one that is."""
        name, wished_bytes = self._seat.instance.name, self._seat.instance.wish_bytes
        return (
            f"kvtide: {tokens} tokens waited for memory for {self._clock() - self._since:.1f} s "
            f"(KVTIDE_WAIT_DEADLINE): {explain(self._seat.ledger.snapshot(), name, wished_bytes)}"
        )

    def why_never(self, tokens: int, most: int) -> str:
        """What is said of one for which there can never be memory."""
        instance = self._seat.instance
        what = "the device" if instance.limit_bytes is None else f"the limit of {instance.name}"
        return (
            f"kvtide: {tokens} tokens can never have memory: {what} allows {most}; raise it or "
            "send shorter requests"
        )


def end_request(scheduler: Any, request: Any, text: str) -> None:
    """Answer a request that waits with an error."""
    from sglang.srt.disaggregation.utils import prepare_abort

    scheduler.waiting_queue.remove(request)
    scheduler._release_aborted_request(request)
    prepare_abort(request, text, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    scheduler.output_streamer.stream_output([request], request.return_logprob)
    _log.warning("%s", text)
