"""The thread beside the scheduler's: it sleeps in the wake channel and wakes the engine."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from kvtide.errors import KvtideError, LedgerError
from kvtide.ledger import Ledger, Waker

__all__ = ["Watch"]

_SEARCH_SECONDS = 0.25


class Watch:
    """Turns wake-ups of the ledgers, deaths of others and one alarm into a flag and a call.

    Parameters
    ----------
    wakers
        The instance's wake channels; the watch is their only listener and closes them.
    ledgers
        Those of its devices.
    wake_engine
        Called from the thread when something came. It must not block.
    """

    def __init__(
        self,
        wakers: Sequence[Waker],
        ledgers: Sequence[Ledger],
        wake_engine: Callable[[], None],
    ) -> None:
        self._wakers = list(wakers)
        self._ledgers = list(ledgers)
        self._searching = False
        self._wake_engine = wake_engine
        try:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            for waker in self._wakers:
                waker.close()
            raise KvtideError(f"no eventfd for the watch: {error.strerror}") from error
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
            if self._searching:
                left = _SEARCH_SECONDS if left is None else min(left, _SEARCH_SECONDS)
            ready = {descriptor for descriptor, _ in poll.poll(left and left * 1000)}
            if self._closed:
                return
            if self._event in ready:
                os.eventfd_read(self._event)
            # All are emptied, and each wake-up of any kind is one call.
            woken = [waker for waker in self._wakers if waker.fileno() in ready and waker.wait(0)]
            due = alarm_at is not None and time.monotonic() >= alarm_at == self._alarm_at
            if due:
                self._alarm_at = None
            if woken or due or (self._searching and self._found_dead()):
                self.called = True
                self._wake_engine()

    def _found_dead(self) -> bool:
        try:
            return sum(ledger.retire_dead() for ledger in self._ledgers) > 0
        except LedgerError:
            # The engine's own thread meets it at its next grant, and says so.
            self._searching = False
            return False

    def search(self, on: bool) -> None:
        """Look for instances that died, every 250 ms: while this one waits for their memory."""
        if on != self._searching:
            self._searching = on
            os.eventfd_write(self._event, 1)

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
