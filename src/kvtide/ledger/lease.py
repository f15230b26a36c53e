"""Leases: open-file-description locks that the kernel drops when their holder dies.

Unlike classic record locks they belong to the open file and not to the process, so closing some
other descriptor of the file drops nothing. The ledger holds leases through one description and
asks through another: a description sees its own locks as free.
"""

from __future__ import annotations

import errno
import fcntl
import struct
from typing import Final

__all__ = ["drop_lease", "is_leased", "take_lease"]

# By number: `fcntl` names them only where Python was built against headers that have them.
_F_OFD_GETLK: Final = 36
_F_OFD_SETLK: Final = 37
_FLOCK: Final = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux


def _flock(kind: int, at_byte: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, 0, at_byte, length, 0)


def take_lease(fd: int, at_byte: int) -> bool:
    """Lock one byte for this open file; False when another one holds it."""
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _flock(fcntl.F_WRLCK, at_byte))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def drop_lease(fd: int, at_byte: int) -> None:
    """Unlock one byte."""
    fcntl.fcntl(fd, _F_OFD_SETLK, _flock(fcntl.F_UNLCK, at_byte))


def is_leased(fd: int, at_byte: int, length: int = 1) -> bool:
    """Whether some *other* open file holds any byte of the range (length 0: to the end)."""
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, _flock(fcntl.F_WRLCK, at_byte, length))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK
