"""The socket between a rank and its scheduler: datagrams in order, peers of the same user only."""

from __future__ import annotations

import errno
import os
import socket
import struct

from kvtide.errors import KvtideError

__all__ = ["MAX_MESSAGE_BYTES", "RankSocket", "SchedulerSocket"]

MAX_MESSAGE_BYTES = 1 << 16
_REACHED_S = 60.0
_UCRED = struct.Struct("3i")
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    uid: int = _UCRED.unpack(raw)[1]
    return uid


def _packets() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise KvtideError(
            f"no socket between a rank and its scheduler: {error.strerror}"
        ) from error


class RankSocket:
    """The rank's end: listens, takes one peer of its own user, and sends without waiting."""

    def __init__(self) -> None:
        # Abstract: it is gone with the process, however that ends, and leaves no file.
        self.address = f"kvtide-rank-{os.getpid()}-{os.urandom(6).hex()}"
        self._listener: socket.socket | None = _packets()
        self._peer: socket.socket | None = None
        self._listener.bind("\0" + self.address)
        # Anybody may knock, and is sent away; one who is meant must not find the door blocked.
        self._listener.listen(64)
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
            except (BlockingIOError, ConnectionError):
                return False
            except OSError as error:
                if error.errno not in _NONE_LEFT:
                    raise
                # It stays in the queue, and is taken when there are descriptors again.
                return False
            if _peer_uid(peer) != os.getuid():
                peer.close()
                continue
            self._peer = peer
            self._listener.close()
            self._listener = None
        return self._peer is not None

    def close(self) -> None:
        """Close."""
        for end in (self._listener, self._peer):
            if end is not None:
                end.close()
        self._listener = self._peer = None


class SchedulerSocket:
    """The scheduler's end: connects once, and takes what has come without waiting."""

    def __init__(self, address: str) -> None:
        self._socket = _packets()
        self._socket.settimeout(_REACHED_S)
        try:
            self._socket.connect("\0" + address)
        except OSError as error:
            self._socket.close()
            raise KvtideError(
                f"the worker that listens on {address} cannot be reached: {error}; "
                "see its log for why it ended"
            ) from error
        if _peer_uid(self._socket) != os.getuid():
            self._socket.close()
            raise KvtideError(f"another user's process listens on {address}: start anew")
        self._socket.setblocking(False)
        # The rank has closed its end, or died.
        self.ended = False

    def receive(self) -> list[bytes]:
        """All messages that have come. Never waits."""
        messages: list[bytes] = []
        while True:
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError:
                message = b""
            if not message:
                self.ended = True
                return messages
            messages.append(message)

    def close(self) -> None:
        """Close."""
        self._socket.close()
