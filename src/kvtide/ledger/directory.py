"""The directory of the ledgers: made private, and trusted only while it is, or for one group."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from kvtide.errors import LedgerError
from kvtide.ledger.layout import UUID_BYTES

__all__ = [
    "check_directory",
    "file_mode",
    "is_shared",
    "ledger_path",
    "ledgers_in",
    "prepare_directory",
]

SUFFIX: Final = ".ledger"
_SHARED_MODE: Final = 0o2770
_UUID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def prepare_directory(directory: Path) -> None:
    """Make the directory, mode 0700, where it is missing, and check it.

    Raises
    ------
    LedgerError
        It cannot be made, or is not private to this user.
    """
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise LedgerError(
            f"the directory of the ledgers, {directory}, cannot be made ({error.strerror}); "
            "set KVTIDE_DIR to a directory that you can make"
        ) from error
    check_directory(directory)


def check_directory(directory: Path) -> None:
    """Refuse a directory that somebody else could write to, other than a group that it is for.

    It is for a group where it is setgid (mode 2770), belongs to root or this user, and to a group
    that this process is in; nobody else's directory is taken for one by its mode alone.

    Raises
    ------
    LedgerError
        It is missing, a link, no directory, of another user, open to others, or below a directory
        that others could exchange it in.
    """
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise LedgerError(f"no directory of ledgers at {directory}: {error.strerror}") from error
    mode = stat.S_IMODE(found.st_mode)
    what = None
    if stat.S_ISLNK(found.st_mode):
        what = "is a symbolic link; name the directory itself"
    elif not stat.S_ISDIR(found.st_mode):
        what = "is not a directory; remove it or name another"
    elif found.st_uid != os.geteuid() and not (is_shared(found) and found.st_uid == 0):
        what = (
            f"belongs to user {found.st_uid}, and you are {os.geteuid()}; "
            "set KVTIDE_DIR to one of your own"
        )
    elif is_shared(found):
        if os.geteuid() != 0 and found.st_gid not in (os.getegid(), *os.getgroups()):
            what = f"is for group {found.st_gid}, and you are not in it"
        elif mode & 0o7777 != _SHARED_MODE:
            what = f"is for a group and open further (mode {mode:04o}); run: chmod 2770 {directory}"
    elif mode & 0o077:
        what = f"is open to others (mode {mode:04o}); run: chmod 700 {directory}"
    if what is None:
        what = _exchangeable(directory)
    if what is not None:
        raise LedgerError(f"the directory of the ledgers, {directory}, {what}")


def is_shared(directory: os.stat_result) -> bool:
    """Whether a directory says that it is for a group."""
    return bool(directory.st_mode & stat.S_ISGID)


def file_mode(directory: os.stat_result) -> int:
    """What files of a directory may be used by: their owner, or the group that it is for."""
    return 0o660 if is_shared(directory) else 0o600


def _exchangeable(directory: Path) -> str | None:
    """Why anybody could put another directory in its place, or None."""
    for above in Path(os.path.realpath(directory)).parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return (
                f"lies below {above}, where anybody could exchange it (mode "
                f"{stat.S_IMODE(mode):04o}); set KVTIDE_DIR to another place"
            )
    return None


def ledger_path(directory: Path, uuid: str) -> Path:
    """Where a device's ledger lies.

    Raises
    ------
    LedgerError
        The UUID cannot be part of a file's name.
    """
    if not _UUID.fullmatch(uuid) or len(uuid) > UUID_BYTES:
        raise LedgerError(f"{uuid!r} is not a device's UUID")
    return directory / f"{uuid}{SUFFIX}"


def ledgers_in(directory: Path) -> list[Path]:
    """All ledgers of a directory, by name; none when there is no such directory.

    Raises
    ------
    LedgerError
        The directory is not private to this user.
    """
    if not os.path.lexists(directory):
        return []
    check_directory(directory)
    return sorted(directory.glob(f"*{SUFFIX}"))
