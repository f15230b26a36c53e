"""What the kernel says of the host device's memory in all processes; never what a ledger says."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from kvtide.errors import DeviceError

__all__ = ["Holding", "holdings", "memfd_name", "used_bytes"]


# Anything else says that a process has ended, or is another user's.
_NOT_ASKED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Holding(NamedTuple):
    """Memory of a host device that one process has open. `inode` tells shared ones apart."""

    pid: int
    inode: tuple[int, int]
    size_bytes: int


def memfd_name(uuid: str) -> str:
    """The name under which a host device's memory shows in `/proc`."""
    return f"kvtide-{uuid}"


def holdings(uuid: str) -> list[Holding]:
    """All memory of this host device, by process.

    Processes that end meanwhile are left out, and so are those that this user may not look into.
    Raises `DeviceError` where the kernel could not be asked: what is not seen is not free.
    Every holder has its descriptor open for as long as it has the memory: `HostDevice` closes
    both together, and nothing of it survives fork or exec.
    """
    link = f"/memfd:{memfd_name(uuid)} (deleted)"
    found = []
    # os rather than pathlib all through: a quarter of the time, and this runs beside serving.
    try:
        names = os.listdir("/proc")  # noqa: PTH208
    except OSError as error:
        raise _unseen(error) from error
    for name in names:
        if not name.isdigit():
            continue
        try:
            directory = os.open(f"/proc/{name}/fd", os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in _NOT_ASKED:
                raise _unseen(error) from error
            continue
        try:
            found += [
                Holding(int(name), inode, size_bytes)
                for inode, size_bytes in _matching(directory, link)
            ]
        finally:
            os.close(directory)
    return found


def _matching(directory: int, link: str) -> list[tuple[tuple[int, int], int]]:
    found = []
    try:
        names = os.listdir(directory)
    except OSError as error:
        if error.errno in _NOT_ASKED:
            raise _unseen(error) from error
        return []
    for name in names:
        try:
            if os.readlink(name, dir_fd=directory) == link:
                status = os.stat(name, dir_fd=directory)
                found.append(((status.st_dev, status.st_ino), status.st_blocks * 512))
        except OSError:
            continue
    return found


def _unseen(error: OSError) -> DeviceError:
    return DeviceError(
        f"who holds memory of the host device cannot be seen: {error.strerror}; raise the limit of "
        "open files (ulimit -n)"
    )


def used_bytes(uuid: str) -> int:
    """Bytes of this host device that all processes hold, each memory counted once."""
    return sum({holding.inode: holding.size_bytes for holding in holdings(uuid)}.values())
