"""Waking those who wait: one datagram socket an instance, beside the ledger."""

from __future__ import annotations

import errno
import os
import re
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from kvtide.errors import LedgerError
from kvtide.ledger.directory import file_mode

__all__ = ["Bell", "Waker"]

_NAME: Final = re.compile(r"(.+)\.(\d+)\.([0-9a-f]+)\.wake")
# Nobody listens, or has wake-ups enough, or looks again by itself in a moment.
_PASSED: Final = (errno.ENOENT, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.EACCES)
_wakers: weakref.WeakSet[Waker] = weakref.WeakSet()


def _name(stem: str, slot: int, generation: int) -> str:
    return f"{stem}.{slot}.{generation:x}.wake"


def _address(directory_fd: int, name: str) -> str:
    # The directory's own path may be longer than a socket's address can be (107 bytes).
    return f"/proc/self/fd/{directory_fd}/{name}"


def _datagrams(flags: int) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | flags)


class Waker:
    """Where the process of one instance's scheduler waits to be woken.

    A wake-up says only that something changed: who is woken looks at the ledger. Wake-ups that came
    while nobody waited are kept, and many are one.
    """

    def __init__(self, directory_fd: int, stem: str, slot: int, generation: int) -> None:
        """Bind it; one of a former life of the same record is replaced.

        Raises
        ------
        LedgerError
            The socket cannot be made.
        """
        name = _name(stem, slot, generation)
        self._name = name
        try:
            self._socket = _datagrams(0)
        except OSError as error:
            raise LedgerError(f"no wake-up socket {name}: {error.strerror}") from error
        try:
            self._directory_fd = os.dup(directory_fd)
        except OSError as error:
            self._socket.close()
            raise LedgerError(f"no wake-up socket {name}: {error.strerror}") from error
        try:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)
            self._socket.bind(_address(directory_fd, name))
            os.chmod(name, file_mode(os.fstat(directory_fd)), dir_fd=directory_fd)
        except OSError as error:
            self._let_go()
            raise LedgerError(f"no wake-up socket {name}: {error.strerror}") from error
        _wakers.add(self)

    def fileno(self) -> int:
        """For `select`: readable when there is a wake-up."""
        return self._socket.fileno()

    def wait(self, timeout: float | None) -> bool:
        """Block until a wake-up or for so many seconds (None: for ever); whether there was one.

        All wake-ups that are there are taken together. 0 only looks.
        """
        self._socket.settimeout(timeout)
        try:
            self._socket.recv(1)
        except (TimeoutError, BlockingIOError):
            return False
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return True

    def close(self) -> None:
        """Remove the socket."""
        if self._socket.fileno() >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._directory_fd)
            self._let_go()

    def _let_go(self) -> None:
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self._directory_fd)


class Bell:
    """Wakes the instances of one ledger. Never waits: a full socket has wake-ups enough."""

    def __init__(self, directory_fd: int, stem: str) -> None:
        """Raises `LedgerError` where no socket can be had."""
        self._directory_fd = directory_fd
        self._stem = stem
        try:
            self._socket = _datagrams(socket.SOCK_NONBLOCK)
        except OSError as error:
            raise LedgerError(f"no socket to wake others: {error.strerror}") from error

    def ring(self, instances: Iterable[tuple[int, int]]) -> None:
        """Wake instances by slot and generation, in this order; who does not listen is passed."""
        for slot, generation in instances:
            name = _name(self._stem, slot, generation)
            try:
                self._socket.sendto(b"!", _address(self._directory_fd, name))
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:  # bound once, by a process that has died
                    self.sweep([(slot, generation)])
                elif error.errno not in _PASSED:
                    raise

    def sweep(self, gone: Iterable[tuple[int, int]]) -> None:
        """Remove the sockets of instances that are gone."""
        for slot, generation in gone:
            with suppress(OSError):  # whoever looks next removes it
                os.unlink(_name(self._stem, slot, generation), dir_fd=self._directory_fd)

    def sweep_all_but(self, live: set[tuple[int, int]]) -> None:
        """Remove every socket of this ledger that no live instance has."""
        try:
            names = os.listdir(self._directory_fd)  # noqa: PTH208 - the directory may move
        except OSError:
            return  # no descriptor left: the next one who registers sweeps
        for name in names:
            match = _NAME.fullmatch(name)
            if match and match[1] == self._stem:
                instance = int(match[2]), int(match[3], 16)
                if instance not in live:
                    self.sweep([instance])

    def close(self) -> None:
        """Close the sending socket."""
        self._socket.close()


def _close_after_fork() -> None:
    # A forked child that kept the socket would make a dead scheduler look like a listening one.
    for waker in list(_wakers):
        waker._let_go()


os.register_at_fork(after_in_child=_close_after_fork)
