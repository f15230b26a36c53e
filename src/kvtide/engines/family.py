"""The processes of one server: none outlives an unexpected death among them.

The outermost process listens; every other one tells it of itself and watches both the outermost
and its own parent. A death that was not announced takes the whole server down at once.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from typing import NoReturn

from kvtide.errors import KvtideError

__all__ = ["at_end", "closing", "end_server", "join", "outlive_members"]

_VARIABLE = "KVTIDE_INTERNAL_FAMILY"
_UCRED = struct.Struct("3i")
_BYE, _CLOSING, _FAIL = b"b", b"c", b"f"
# Until a process that is killed is gone, its memory too: on busy cores that takes seconds.
_DYING_SECONDS = 60.0


class _Outermost:
    """Listens for the members of its server and ends them all when one dies."""

    def __init__(self) -> None:
        # Abstract: it is gone with the process and leaves no file.
        self.address = f"kvtide-family-{os.getpid()}-{os.urandom(6).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        # Whoever has come is either still to be accepted or among the members.
        self._admitting = threading.RLock()
        self._members: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, connection
        # Those of them that said goodbye: they live on until the last of them is torn down.
        self._leaving: set[int] = set()
        # The engine is ending its processes itself, also by force: no death is unexpected.
        self.closing = False
        self.at_end: list[Callable[[], None]] = []
        threading.Thread(target=self._run, name="kvtide-family", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        connections: dict[int, int] = {}  # connection -> pidfd
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._listener.fileno():
                    self._admit(poll, connections)
                elif descriptor in connections:
                    self._hear(descriptor, poll, connections)
                elif descriptor in self._members:
                    pid, connection = self._members[descriptor]
                    if not self.closing and descriptor not in self._leaving:
                        self.end(f"process {pid} of this server ended unexpectedly", 1)
                    if connections.pop(connection.fileno(), None) is not None:
                        poll.unregister(connection)
                    self._dismiss(descriptor, poll)

    def _admit(self, poll: select.poll, connections: dict[int, int]) -> None:
        with self._admitting:
            come = self._accept()
            if come is None:
                return
            pid, connection = come
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self.end(f"process {pid} of this server ended unexpectedly", 1)
            self.closing = False
            self._members[pidfd] = (pid, connection)
        connections[connection.fileno()] = pidfd
        poll.register(pidfd, select.POLLIN)
        poll.register(connection, select.POLLIN)

    def _accept(self) -> tuple[int, socket.socket] | None:
        """The next process of this user that has come; None when there is none."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return None
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _ = _UCRED.unpack(raw)
            if uid == os.getuid():
                return pid, connection
            connection.close()

    def _hear(self, descriptor: int, poll: select.poll, connections: dict[int, int]) -> None:
        pidfd = connections[descriptor]
        _, connection = self._members[pidfd]
        try:
            message = connection.recv(1 << 16)
        except ConnectionError:
            message = b""
        if message.startswith(_FAIL):
            status, _, text = message[1:].decode().partition(":")
            self.end(text, int(status))
        if message == _CLOSING:
            self.closing = True
            return
        poll.unregister(connection)
        del connections[descriptor]
        if message == _BYE:
            self._leaving.add(pidfd)
        # A connection that just ends says nothing: the pidfd tells whether the process lives.

    def _dismiss(self, pidfd: int, poll: select.poll) -> None:
        poll.unregister(pidfd)
        _, connection = self._members.pop(pidfd)
        self._leaving.discard(pidfd)
        os.close(pidfd)
        connection.close()

    def forget(self) -> None:
        """In a forked child: this was the parent's."""
        self._listener.close()
        for pidfd, (_, connection) in self._members.items():
            os.close(pidfd)
            connection.close()

    def outlive(self, seconds: float) -> None:
        """Return when every member is gone; what lives on after some time is killed."""
        with self._admitting:
            come = [*self._members.values()]
            # The thread that listens may not have had its turn since the last ones came.
            while (late := self._accept()) is not None:
                come.append(late)
        pids = [pid for pid, _ in come]
        for pid in _living(pids, seconds):
            _kill(pid)
        _living(pids, _DYING_SECONDS)

    def end(self, text: str, status: int) -> NoReturn:
        """End every member and this process."""
        print(f"kvtide: {text}", file=sys.stderr, flush=True)
        # The engine's other threads see its processes die now, and would have the last word.
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for pid, _ in self._members.values():
            _kill(pid)
        for callback in self.at_end:
            callback()
        os._exit(status)


class _Member:
    """Tells the outermost process of itself, and ends when it or the parent does."""

    def __init__(self, outermost_pid: int, address: str) -> None:
        self._parent = os.getppid()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect("\0" + address)
            watched = [os.pidfd_open(pid) for pid in {outermost_pid, self._parent}]
        except (ConnectionError, ProcessLookupError):
            _kill(os.getpid())
        if os.getppid() != self._parent:
            _kill(os.getpid())
        self._pid = os.getpid()
        threading.Thread(
            target=self._run, args=(watched,), name="kvtide-family", daemon=True
        ).start()
        atexit.register(self.say_bye)
        # A child of multiprocessing leaves without running what atexit holds.
        multiprocessing_util.Finalize(None, self.say_bye, exitpriority=1000)

    def _run(self, watched: list[int]) -> None:
        poll = select.poll()
        for pidfd in watched:
            poll.register(pidfd, select.POLLIN)
        poll.poll()
        _kill(os.getpid())

    def say_bye(self) -> None:
        """Announce an orderly end."""
        if os.getpid() == self._pid:
            self._send(_BYE)

    def say_closing(self) -> None:
        """Announce that the engine ends its processes itself."""
        self._send(_CLOSING)

    def fail(self, text: str, status: int) -> NoReturn:
        """Have the whole server end with this text."""
        self._send(_FAIL + f"{status}:{text}".encode()[: 1 << 15])
        # The outermost process ends this one.
        signal.pause()
        os._exit(status)

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            # The outermost process is gone: the watch ends this one.
            return

    def forget(self) -> None:
        """In a forked child: this was the parent's."""
        self._connection.close()


_role: _Outermost | _Member | None = None


def join() -> bool:
    """Join this process's server, or found one when no process above it has.

    Returns
    -------
    bool
        Whether this process is the outermost of its server.
    """
    global _role
    if _role is None:
        founder = os.environ.get(_VARIABLE)
        if founder is None:
            _role = _Outermost()
            os.environ[_VARIABLE] = f"{os.getpid()}:{_role.address}"
        else:
            _role = _join_as_member()
        # A child that multiprocessing forks becomes a member of its own; others only let go.
        os.register_at_fork(after_in_child=_forget)
        multiprocessing_util.register_after_fork(_Member, _rejoin)
    return isinstance(_role, _Outermost)


def _join_as_member() -> _Member:
    pid, _, address = os.environ[_VARIABLE].partition(":")
    return _Member(int(pid), address)


def _forget() -> None:
    global _role
    if _role is not None:
        _role.forget()
    _role = None


def _rejoin(_: object) -> None:
    global _role
    _role = _join_as_member()


def closing() -> None:
    """The engine ends in an orderly way from here on, and may end its processes by force."""
    if isinstance(_role, _Outermost):
        _role.closing = True
    elif isinstance(_role, _Member):
        _role.say_closing()


def at_end(callback: Callable[[], None]) -> None:
    """In the outermost process: call this when the server ends, also when it is taken down."""
    # After multiprocessing has ended and joined its children, which it does at exit.
    multiprocessing_util.Finalize(None, callback, exitpriority=-1000)
    if isinstance(_role, _Outermost):
        _role.at_end.append(callback)


def outlive_members(seconds: float) -> None:
    """In the outermost process at its end: return when all others of the server are gone.

    Their leases and their memory are then gone too. What has not ended after `seconds` is killed.
    """
    if isinstance(_role, _Outermost):
        _role.outlive(seconds)


def end_server(error: KvtideError) -> NoReturn:
    """End the whole server with one clear message and the error's exit status."""
    if isinstance(_role, _Outermost):
        _role.end(str(error), error.exit_status)
    if isinstance(_role, _Member):
        _role.fail(str(error), error.exit_status)
    print(f"kvtide: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_status)


def _living(pids: list[int], seconds: float) -> list[int]:
    """Those that live after so long; at once when none does."""
    poll, pid_of = select.poll(), {}
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        pid_of[pidfd] = pid
        poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + seconds
    living = dict(pid_of)
    while living and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            del living[pidfd]
    for pidfd in pid_of:
        os.close(pidfd)
    return list(living.values())


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
