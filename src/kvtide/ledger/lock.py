"""The short lock under which a ledger changes: a flock, tried for a bounded time."""

from __future__ import annotations

import fcntl
import threading
import time
from typing import Final

from kvtide.errors import LedgerError

__all__ = ["ChangeLock"]

_TRY: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
PATIENCE_S: Final = 0.05
_FIRST_NAP_S: Final = 20e-6
_LONGEST_NAP_S: Final = 200e-6
_LONGEST_PAUSE_S: Final = 1.0


class ChangeLock:
    """A flock of one descriptor, and a thread lock, since threads share the descriptor's flock.

    A try lasts 50 ms at most; then it is a miss. After a miss this process tries only once, without
    waiting, until a pause has passed that doubles with every further miss up to 1 s: a stopped
    holder costs a scheduler 50 ms now and then, and not 50 ms in every step.
    """

    __slots__ = ("_fd", "_owner", "_patient_from", "_pause_s", "_thread")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._thread = threading.Lock()
        self._owner = 0
        self._pause_s = PATIENCE_S
        self._patient_from = 0.0

    def acquire(self, patience_s: float | None = None) -> bool:
        """Take the lock; False is a miss. With a patience of its own a try is always so long.

        Raises
        ------
        LedgerError
            The filesystem cannot lock.
        """
        if self._thread.acquire(blocking=False):
            self._owner = threading.get_ident()
            try:
                fcntl.flock(self._fd, _TRY)
            except BlockingIOError:
                self._forget()
            except OSError as error:
                self._forget()
                raise LedgerError(f"the ledger's filesystem cannot lock files: {error}") from error
            except BaseException:
                self.release()
                raise
            else:
                return True
        return self._insist(patience_s)

    def forgive(self) -> None:
        """After a miss while others got on: it was a crowd, no holder is stopped, so no pause."""
        self._patient_from = 0.0
        self._pause_s = PATIENCE_S

    def mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    def release(self) -> None:
        """Let go of the lock if this thread holds it."""
        if self._owner == threading.get_ident():
            try:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            finally:
                self._forget()

    def _forget(self) -> None:
        self._owner = 0
        self._thread.release()

    def _insist(self, patience_s: float | None) -> bool:
        now = time.monotonic()
        if patience_s is None:
            if now < self._patient_from:
                return False
            patience_s = PATIENCE_S
        deadline = now + patience_s
        if not self._thread.acquire(timeout=patience_s):
            return self._missed()
        self._owner = threading.get_ident()
        nap_s = _FIRST_NAP_S
        try:
            while True:
                try:
                    fcntl.flock(self._fd, _TRY)
                except BlockingIOError:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        break
                    time.sleep(min(nap_s, left_s))
                    nap_s = min(2 * nap_s, _LONGEST_NAP_S)
                else:
                    self._pause_s = PATIENCE_S
                    return True
        except BaseException:
            self.release()
            raise
        self._forget()
        return self._missed()

    def _missed(self) -> bool:
        self._patient_from = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return False
