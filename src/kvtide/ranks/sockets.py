"""The socket between a rank and its scheduler: datagrams in order, peers of the same user only."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from kvtide.errors import KvtideError

__all__ = ["MAX_MESSAGE_BYTES", "RankSocket", "SchedulerSocket"]

MAX_MESSAGE_BYTES = 1 << 16
_UCRED = struct.Struct("3i")


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(raw)[1]
    return uid


def _by_descriptor(path: Path) -> tuple[int, str]:
    """The directory opened, and a name below 108 bytes that leads to the path through it."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return directory, f"/proc/self/fd/{directory}/{path.name}"


class RankSocket:
    """The rank's end: listens, takes one peer of its own user, and sends without waiting."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._peer: socket.socket | None = None
        directory, name = _by_descriptor(path)
        try:
            self._listener.bind(name)
        finally:
            os.close(directory)
        path.chmod(0o600)
        self._listener.listen(1)
        self._listener.setblocking(False)

    def send(self, message: bytes) -> bool:
        """Send, or say that it could not be sent now. Never waits."""
        if self._peer is None and not self._accept():
            return False
        assert self._peer is not None
        try:
            self._peer.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, ConnectionError):
            # A scheduler that is gone takes this process down by other means.
            return False
        return True

    def _accept(self) -> bool:
        while self._listener is not None:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return False
            if _peer_uid(peer) != os.getuid():
                peer.close()
                continue
            self._peer = peer
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
        return self._peer is not None

    def close(self) -> None:
        """Close and leave no file."""
        for end in (self._listener, self._peer):
            if end is not None:
                end.close()
        self._listener = self._peer = None
        self.path.unlink(missing_ok=True)


class SchedulerSocket:
    """The scheduler's end: connects once, and takes what has come without waiting."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        directory, name = _by_descriptor(path)
        try:
            self._socket.connect(name)
        except OSError as error:
            self._socket.close()
            raise KvtideError(
                f"the worker that listens on {path} cannot be reached: {error}; "
                "see its log for why it ended"
            ) from error
        finally:
            os.close(directory)
        if _peer_uid(self._socket) != os.getuid():
            self._socket.close()
            raise KvtideError(f"another user's process listens on {path}; make its directory yours")
        self._socket.setblocking(False)

    def receive(self) -> list[bytes]:
        """All messages that have come."""
        messages: list[bytes] = []
        while True:
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
            except (BlockingIOError, ConnectionError):
                return messages
            if not message:
                return messages
            messages.append(message)

    def close(self) -> None:
        """Close."""
        self._socket.close()
