"""An open ledger file: its words, lock and sequence, and the check that it is still the one."""

from __future__ import annotations

import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.creation import open_description, settle, wait_begun, why_unusable
from kvtide.ledger.damage import damage, is_out_of_bounds
from kvtide.ledger.directory import check_directory, is_shared, prepare_directory
from kvtide.ledger.lease import drop_lease, is_leased, take_lease
from kvtide.ledger.lock import ChangeLock
from kvtide.ledger.records import DeviceSpec

__all__ = ["LOOK_SECONDS", "LedgerFile"]

# How long a look at the file's size holds, for who only reads or stores a word.
LOOK_SECONDS: Final = 0.1

_OPENING_S: Final = 5.0
_PATIENCE_S: Final = 1.0
_open_files: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


class LedgerFile:
    """Three open file descriptions of one ledger: for the lock, for leases, and under the mapping.

    They are apart because a mapping keeps its description, with every lock on it, in a forked child
    that has closed all descriptors; and because a description sees its own leases as free.

    Attributes
    ----------
    words
        The whole file as signed 8-byte words; loads and stores are whole.
    raw
        The whole file as bytes, for text.
    closed
        Why the file cannot be used any more, or None.
    """

    def __init__(self, path: Path, lock_fd: int, lock: ChangeLock) -> None:
        """Take over an open, settled description. Use `create` or `attach`."""
        self.path = path
        self.closed: str | None = None
        self._pid = os.getpid()
        self._lock = lock
        found = os.fstat(lock_fd)
        self._where = os.fspath(path)
        self._identity = (found.st_ino, found.st_dev)
        self._fds = [lock_fd]
        self._probe_fd = lock_fd
        self._look_at = 0.0
        with ExitStack() as undo:
            undo.callback(self._close_descriptors)
            try:
                self._lease_fd = open_description(path)
                self._fds.append(self._lease_fd)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                self.directory_fd = os.open(path.parent, flags)
                self._fds.append(self.directory_fd)
                self._map = self._mapped()
            except OSError as error:
                message = f"the ledger {path} cannot be mapped: {error.strerror}"
                raise LedgerError(message) from error
            undo.pop_all()
        self.raw = memoryview(self._map)
        self.words = self.raw.cast("q")
        _open_files.add(self)

    def _mapped(self) -> mmap.mmap:
        map_fd = open_description(self.path)
        try:
            self._check_identity()
            if {os.fstat(fd).st_ino for fd in (map_fd, self._lease_fd)} != {self._identity[0]}:
                raise LedgerError(self._replaced())
            return mmap.mmap(map_fd, w.FILE_BYTES)
        finally:
            os.close(map_fd)

    @classmethod
    def create(cls, path: Path, spec: DeviceSpec) -> LedgerFile:
        """Open a device's ledger, made where it is missing.

        Raises
        ------
        LedgerError
            Its directory or the file cannot be trusted, used or made, or is another's.
        LedgerBusyError
            It stayed locked for 5 s.
        """
        prepare_directory(path.parent)
        if spec.backend == "host" and is_shared(path.parent.stat()):
            raise LedgerError(
                f"the host device cannot be shared by a group, as {path.parent} is: what another "
                "user's processes hold cannot be seen. Set KVTIDE_DIR to a directory of your own"
            )
        return cls._open(path, spec)

    @classmethod
    def attach(cls, path: Path) -> LedgerFile:
        """Open a ledger that exists, whatever device it is of. Raises as `create` does."""
        check_directory(path.parent)
        return cls._open(path, None)

    @classmethod
    def _open(cls, path: Path, spec: DeviceSpec | None) -> LedgerFile:
        fd = open_description(path, create=spec is not None)
        lock = ChangeLock(fd)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            if spec is None:
                wait_begun(fd)
            if not lock.acquire(_OPENING_S):
                raise LedgerBusyError(_busy(path, _holder_in(fd)))
            try:
                if spec is not None:
                    settle(fd, path, spec)
                elif why := why_unusable(fd):
                    raise LedgerError(f"the ledger {path} cannot be read: {why}")
            finally:
                lock.release()
            undo.pop_all()
        return cls(path, fd, lock)

    # ---- changes ----

    def begin(self, patience_s: float | None = None, *, hasty: bool = False) -> bool:
        """Take the lock and open a change; False is a miss. Always pair with `end` in a finally.

        `hasty` is for a caller that itself holds the figures it uses against what they can be.

        Raises
        ------
        LedgerError
            The file at the path is not this one any more, was cut, or is damaged; or this is
            closed.
        """
        self.check()
        words = self.words
        before = words[w.H_SEQUENCE]
        if not self._lock.acquire(patience_s):
            if words[w.H_SEQUENCE] != before:
                self._lock.forgive()
            return False
        self._check_identity()
        if is_out_of_bounds(words) or (not hasty and damage(words)):
            raise LedgerError(self.damaged())
        sequence: int = words[w.H_SEQUENCE]
        words[w.H_HOLDER_PID] = self._pid
        if sequence & 1:  # a writer died in the middle
            _repair(words)
        words[w.H_SEQUENCE] = (sequence + 1) | 1
        return True

    def end(self) -> None:
        """Close a change and let go of the lock, if this thread has it."""
        if self._lock.mine():
            words = self.words
            sequence = words[w.H_SEQUENCE]
            if sequence & 1:
                if sys.exc_info()[0] is not None:  # interrupted in the middle, as by a signal
                    _repair(words)
                words[w.H_SEQUENCE] = sequence + 1
            self._lock.release()

    @contextmanager
    def change(self) -> Iterator[memoryview]:
        """`begin` and `end` around a rare change that must happen; gives the words.

        Raises
        ------
        LedgerBusyError
            It stayed locked for a second.
        """
        try:
            if not self.begin(_PATIENCE_S):
                raise LedgerBusyError(self.busy())
            yield self.words
        finally:
            self.end()

    def check(self) -> None:
        """Whether the words may be read and stored, for who does so without a change.

        Raises
        ------
        LedgerError
            This is closed, or the file was cut.
        """
        if self.closed is not None:
            raise LedgerError(self.closed)
        if time.monotonic() >= self._look_at:
            self._look()

    def check_whole(self) -> None:
        """As `check`, and that what live records say can be. Raises as `check` does."""
        self.check()
        if damage(self.words, tables=False):
            raise LedgerError(self.damaged())

    def busy(self) -> str:
        """Who holds the lock, for a message."""
        return _busy(self.path, self.words[w.H_HOLDER_PID])

    def _check_identity(self) -> None:
        try:
            found = os.stat(self._where)  # noqa: PTH116 - on the path of every grant
        except OSError:
            raise LedgerError(self._replaced()) from None
        if (found.st_ino, found.st_dev) != self._identity:
            raise LedgerError(self._replaced())
        if found.st_size != w.FILE_BYTES:
            raise LedgerError(self._cut(found.st_size))

    def _look(self) -> None:
        """Before words are touched: where a cut file ends, touching its mapping kills.

        Now and then: a system call lets other threads have the interpreter, which an engine must
        not do in every step.
        """
        size_bytes = os.fstat(self._probe_fd).st_size
        if size_bytes != w.FILE_BYTES:
            raise LedgerError(self._cut(size_bytes))
        self._look_at = time.monotonic() + LOOK_SECONDS

    def _cut(self, size_bytes: int) -> str:
        return (
            f"the ledger {self.path} was cut to {size_bytes} bytes while it was in use. End every "
            "engine of this device: the next one makes it anew"
        )

    def damaged(self) -> str:
        """What is wrong with it and what to do, for a message."""
        why = damage(self.words) or "its header holds figures that cannot be"
        return (
            f"the ledger {self.path} is damaged: {why}. Nothing is granted by it any more. End "
            "every engine of this device: the next one makes it anew"
        )

    def _replaced(self) -> str:
        return (
            f"the ledger {self.path} was removed or replaced while this process used it: others "
            "account elsewhere now. Restart every engine of this device"
        )

    # ---- leases ----

    def take_lease(self, word: int) -> bool:
        """Hold the lease of the record that begins at a word, for this process's life."""
        return take_lease(self._lease_fd, word * w.WORD_BYTES)

    def drop_lease(self, word: int) -> None:
        """Let go of the lease of a record."""
        drop_lease(self._lease_fd, word * w.WORD_BYTES)

    def is_leased(self, word: int) -> bool:
        """Whether a living process, this one too, holds the lease of a record."""
        return is_leased(self._probe_fd, word * w.WORD_BYTES)

    # ---- closing ----

    def close(self) -> None:
        """Drop lock, leases and mapping."""
        if self.closed is None:
            self.closed = f"the ledger {self.path} was closed"
            self._close_descriptors()
            self.words.release()
            self.raw.release()
            self._map.close()

    def forked(self) -> None:
        """In a forked child: keep neither lock nor lease alive, and refuse all use."""
        if self.closed is None:
            self.closed = (
                f"the ledger {self.path} was opened by the process that this one was forked from; "
                "open it anew"
            )
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            with suppress(OSError):  # there is nothing to do about a close that fails
                os.close(fd)


def _repair(words: memoryview) -> None:
    """Finish what a writer began who died or was interrupted.

    Stores are ordered so that only this can be left undone.
    """
    for at in map(w.pool_at, range(w.MAX_POOLS)):
        if not words[at] & 1:
            words[at + w.P_CHARGE] = 0


def _busy(path: Path, pid: int) -> str:
    return f"the ledger {path} stayed locked; process {pid} held it last (is it stopped?)"


def _holder_in(fd: int) -> int:
    word = os.pread(fd, w.WORD_BYTES, w.H_HOLDER_PID * w.WORD_BYTES)
    return int.from_bytes(word, "little", signed=True) if word else 0


def _close_after_fork() -> None:
    for file in list(_open_files):
        file.forked()


os.register_at_fork(after_in_child=_close_after_fork)
