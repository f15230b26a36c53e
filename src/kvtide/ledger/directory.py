"""The directory of the ledgers: made private, and trusted only while it is."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from kvtide.errors import LedgerError
from kvtide.ledger.layout import UUID_BYTES

__all__ = ["check_directory", "ledger_path", "ledgers_in", "prepare_directory"]

SUFFIX: Final = ".ledger"
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
    """Refuse a directory that somebody else could write to.

    Raises
    ------
    LedgerError
        It is missing, a link, no directory, of another user, or open to others.
    """
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise LedgerError(f"no directory of ledgers at {directory}: {error.strerror}") from error
    what = None
    if stat.S_ISLNK(found.st_mode):
        what = "is a symbolic link; name the directory itself"
    elif not stat.S_ISDIR(found.st_mode):
        what = "is not a directory; remove it or name another"
    elif found.st_uid != os.geteuid():
        what = (
            f"belongs to user {found.st_uid}, and you are {os.geteuid()}; "
            "set KVTIDE_DIR to one of your own"
        )
    elif found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        what = f"is open to others (mode {mode:04o}); run: chmod 700 {directory}"
    if what is not None:
        raise LedgerError(f"the directory of the ledgers, {directory}, {what}")


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
