"""The thread beside the scheduler's: it sleeps in the wake channel and wakes the engine."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from kvtide.ledger import Waker

__all__ = ["Watch"]


class Watch:
    """Turns wake-ups of the ledgers and one alarm into a flag and a call.

    Parameters
    ----------
    wakers
        The instance's wake channels; the watch is their only listener and closes them.
    wake_engine
        Called from the thread when something came. It must not block.
    """

    def __init__(self, wakers: Sequence[Waker], wake_engine: Callable[[], None]) -> None:
        self._wakers = list(wakers)
        self._wake_engine = wake_engine
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._alarm_at: float | None = None
        self._closed = False
        # Set by the thread, cleared by the scheduler: something wants to be looked at.
        self.called = False
        self._thread = threading.Thread(target=self._run, name="kvtide-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._event, select.POLLIN)
        for waker in self._wakers:
            poll.register(waker.fileno(), select.POLLIN)
        while not self._closed:
            alarm_at = self._alarm_at
            left = None if alarm_at is None else max(0.0, alarm_at - time.monotonic())
            ready = {descriptor for descriptor, _ in poll.poll(left and left * 1000)}
            if self._closed:
                return
            if self._event in ready:
                os.eventfd_read(self._event)
            # All are emptied, and each wake-up of any kind is one call.
            woken = [waker for waker in self._wakers if waker.fileno() in ready and waker.wait(0)]
            if not ready and alarm_at == self._alarm_at:
                self._alarm_at = None
            if woken or not ready:
                self.called = True
                self._wake_engine()

    def alarm(self, seconds: float | None) -> None:
        """Call once after so many seconds, in place of an earlier alarm; None: never."""
        if seconds is None and self._alarm_at is None:
            return
        self._alarm_at = None if seconds is None else time.monotonic() + seconds
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """End the thread and the channels."""
        self._closed = True
        os.eventfd_write(self._event, 1)
        self._thread.join()
        for waker in self._wakers:
            waker.close()
        os.close(self._event)
