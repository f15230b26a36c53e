"""What surrounds a process, made hostile: children of their own, small filesystems, other users."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtide.ledger import Ledger
from kvtide.ledger import layout as w

_libc = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_REMOUNT, _MS_PRIVATE, _MS_REC = 1, 32, 1 << 18, 1 << 14
_CLONE_NEWNS = 0x20000
PATIENCE_S = 100.0
NOBODY = 65534


class ChildDiedError(AssertionError):
    """A child ended otherwise than by returning: `status` is negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the child ended with {status}")
        self.status = status


class Child:
    """A forked process that runs one function, says what it returned, and ends."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                faulthandler.disable()
                # What earlier tests left is not this child's to collect: its descriptors are
                # counted, and a test that fails leaves many.
                gc.freeze()
                try:
                    said = pickle.dumps((True, body()))
                except Exception as error:  # noqa: BLE001 - told to the parent, whatever it is
                    traceback.print_exc()
                    said = pickle.dumps((False, repr(error)))
                with os.fdopen(write, "wb") as file:
                    file.write(said)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        self.gentle = True
        # What it raised, once it has ended.
        self.error: str | None = None
        self._status: int | None = None
        self._stopped = False

    def waits_for_signal(self) -> bool:
        """Wait until it ends or is stopped; whether it is stopped."""
        if self._status is not None or self._stopped:
            return self._stopped
        deadline = time.monotonic() + PATIENCE_S
        while True:
            pid, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                self._stopped = True
                return True
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                return False
            assert time.monotonic() < deadline, "the child neither ends nor stops"
            time.sleep(0.0005)

    def send(self, number: signal.Signals) -> None:
        self._stopped = False
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it has not ended, whatever it does."""
        if self._status is None:
            self.send(signal.SIGKILL)
            self.end()

    def end(self) -> int:
        """Its exit status, negative for a signal; its pipe is closed."""
        if self._status is None:
            deadline = time.monotonic() + PATIENCE_S
            while self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    break
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    raise AssertionError("the child hung")
                time.sleep(0.0005)
        if self._read >= 0:
            os.set_blocking(self._read, False)
            with contextlib.suppress(BlockingIOError), os.fdopen(self._read, "rb") as file:
                said = file.read()
                if self._status == 0 and said:
                    returned, value = pickle.loads(said)
                    self.error = None if returned else value
            self._read = -1
        return self._status

    def result(self) -> Any:
        """What it returned."""
        said = b""
        while select.select([self._read], [], [], PATIENCE_S)[0]:
            part = os.read(self._read, 1 << 16)
            if not part:
                break
            said += part
        status = self.end()
        if status != 0 or not said:
            raise ChildDiedError(status)
        returned, value = pickle.loads(said)
        assert returned, value
        return value


def in_child(body: Callable[[], object]) -> Any:
    """Run a function in a forked process; what it returned there."""
    return Child(body).result()


def become(user: int, *groups: int) -> None:
    """In a child of root: be another user from now on."""
    os.setgroups(groups)
    os.setgid(groups[0] if groups else user)
    os.setuid(user)


def _mount(source: str, target: Path, kind: str, flags: int, data: str) -> None:
    arguments = (source.encode(), str(target).encode(), kind.encode(), flags, data.encode())
    if _libc.mount(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def own_mounts() -> None:
    """In a child: mounts from now on are this process's own."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _mount("none", Path("/"), "none", _MS_PRIVATE | _MS_REC, "")


def mount_memory(target: Path, data: str) -> None:
    _mount("tmpfs", target, "tmpfs", 0, data)


def make_read_only(target: Path) -> None:
    _mount("tmpfs", target, "tmpfs", _MS_REMOUNT | _MS_RDONLY, "")


def can_mount() -> bool:
    """Whether this process may have mounts of its own: root, outside of most sandboxes."""
    try:
        return bool(in_child(lambda: own_mounts() is None))
    except AssertionError:
        return False


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Ledger]:
    ledger = Ledger.attach(path)
    try:
        yield ledger
    finally:
        ledger.close()


def assert_whole(ledger: Ledger) -> None:
    """Between changes: nobody is in the middle of one, and no ended record has a charge."""
    words = ledger.file.words
    assert not words[w.H_SEQUENCE] & 1
    ended = [at for at in map(w.pool_at, range(w.MAX_POOLS)) if not words[at] & 1]
    assert not any(words[at + w.P_CHARGE] for at in ended)
