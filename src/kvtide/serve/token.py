"""The token that every change needs: in a file that its owner alone can read."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from kvtide.errors import KvtideError
from kvtide.ledger.directory import is_shared

__all__ = ["Token"]

_MIN_LENGTH = 32


class Token:
    """Kept in the directory of the ledgers, made where there is none; each user has one."""

    def __init__(self, directory: Path) -> None:
        """Read or make it.

        Raises
        ------
        KvtideError
            It cannot be made, or others could read it.
        """
        self.path = directory / "serve.token"
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            if is_shared(directory.stat()):
                # In a group's directory each of its users has one.
                self.path = directory / f"serve-{os.geteuid()}.token"
            self.text = self._made() or self._read()
        except OSError as error:
            raise KvtideError(f"the token {self.path} cannot be used: {error.strerror}") from error

    def _made(self) -> str | None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except FileExistsError:
            return None
        text = secrets.token_urlsafe(32)
        with os.fdopen(fd, "w") as file:
            file.write(text + "\n")
        return text

    def _read(self) -> str:
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd) as file:
            found = os.fstat(fd)
            text = file.read(4096).strip()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise KvtideError(
                f"the token {self.path} can be read by others (user {found.st_uid}, mode "
                f"{mode:04o}): remove it, and a new one is made"
            )
        if len(text) < _MIN_LENGTH or not text.isascii():
            raise KvtideError(f"there is no token in {self.path}: remove it, and one is made")
        return text

    def matches(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries it; takes as long whatever is wrong."""
        given = (authorization or "").encode(errors="replace")
        return hmac.compare_digest(given, f"Bearer {self.text}".encode())
