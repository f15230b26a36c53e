"""A ledger's file: made, checked against what the opener expects, made anew when it is nobody's."""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path
from typing import Final

from kvtide.errors import LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.damage import damage
from kvtide.ledger.directory import file_mode, is_shared
from kvtide.ledger.lease import is_leased
from kvtide.ledger.records import DeviceSpec
from kvtide.units import format_size

__all__ = [
    "difference",
    "open_description",
    "read_spec",
    "settle",
    "spec_of",
    "wait_begun",
    "why_unreadable",
    "why_unusable",
]

# Without O_NONBLOCK a pipe in its place would keep a reader waiting for ever.
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_SPEC_BYTES: Final = (1 << 62) - 1
_BEGUN_S: Final = 0.05
_NAP_S: Final = 200e-6


def open_description(path: Path, *, create: bool = False, write: bool = True) -> int:
    """Open a ledger's file as a new open file description.

    Raises
    ------
    LedgerError
        There is none, it cannot be opened, is no plain file, or belongs to somebody else.
    """
    flags = _FLAGS | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        hint = "; it is a symbolic link" if path.is_symlink() else ""
        raise LedgerError(f"the ledger {path} cannot be opened: {error.strerror}{hint}") from error
    found = os.fstat(fd)
    directory = path.parent.stat()
    what = None
    if not stat.S_ISREG(found.st_mode):
        what = "is not a plain file; remove it"
    elif is_shared(directory):
        if found.st_uid == os.geteuid() and create:
            os.fchmod(fd, file_mode(directory))
        elif found.st_gid != directory.st_gid or found.st_mode & 0o007:
            what = f"is not for group {directory.st_gid} alone, as its directory is; remove it"
    elif found.st_uid != os.geteuid():
        what = f"belongs to user {found.st_uid}, and you are {os.geteuid()}; remove it"
    if what is not None:
        os.close(fd)
        raise LedgerError(f"the ledger {path} {what}")
    return fd


def wait_begun(fd: int) -> None:
    """An empty file is one that somebody has created a moment ago and is about to lock and make a
    ledger of: wait until that has begun, at most 50 ms.
    """
    until = time.monotonic() + _BEGUN_S
    while os.fstat(fd).st_size == 0 and time.monotonic() < until:
        time.sleep(_NAP_S)


def _check_spec(spec: DeviceSpec) -> None:
    sizes = (spec.total_bytes, spec.margin_bytes, spec.budget_cap_bytes or 0)
    if not all(0 <= size <= _MAX_SPEC_BYTES for size in sizes) or spec.granularity_bytes < 1:
        raise LedgerError(f"no device is like this: {spec}")


def settle(fd: int, path: Path, spec: DeviceSpec) -> None:
    """Under the lock: leave a ledger at `fd` that is `spec`'s.

    Raises
    ------
    LedgerError
        It is another one and a process lives by it, or there is no room for it.
    """
    _check_spec(spec)
    leased = is_leased(fd, 0, 0)  # any byte: whatever the layout, without a lease nothing is live
    why = why_unusable(fd)
    if why is None:
        found = read_spec(fd)
        why = difference(found, spec)
        same_cap = found.budget_cap_bytes == spec.budget_cap_bytes
        if why is None and (leased or (same_cap and not _has_leftovers(fd))):
            return
    if leased:
        raise LedgerError(
            f"the ledger {path} is in use and not the one expected here: {why}. Start with the "
            "same settings as the processes that use it, end those first, or set another KVTIDE_DIR"
        )
    _initialise(fd, path, spec)


def why_unreadable(fd: int) -> str | None:
    """Why this version of kvtide cannot read the file, or None if it can."""
    size_bytes = os.fstat(fd).st_size
    head = memoryview(os.pread(fd, w.HEADER_WORDS * w.WORD_BYTES, 0))
    if len(head) < w.HEADER_WORDS * w.WORD_BYTES:
        return f"it is cut short ({size_bytes} bytes)"
    words = head.cast("q")
    if words[w.H_MAGIC] != w.MAGIC:
        return "it is not a ledger of kvtide"
    if words[w.H_LAYOUT] != w.LAYOUT:
        return f"its layout is version {words[w.H_LAYOUT]}, and this kvtide knows {w.LAYOUT}"
    if size_bytes != w.FILE_BYTES:
        return f"it has {size_bytes} bytes where its layout has {w.FILE_BYTES}"
    return None


def _has_leftovers(fd: int) -> bool:
    """Whether records that have ended answer for something, by a writer's death or by damage."""
    words = memoryview(os.pread(fd, w.FILE_BYTES, 0)).cast("q")
    pools = map(w.pool_at, range(w.MAX_POOLS))
    return any(words[at + w.P_CHARGE] and not words[at] & 1 for at in pools)


def why_unusable(fd: int) -> str | None:
    """Why nothing may be accounted for in the file: it is unreadable, or damaged; else None."""
    why = why_unreadable(fd)
    if why is None:
        why = damage(memoryview(os.pread(fd, w.FILE_BYTES, 0)).cast("q"))
        if why is not None:
            return f"it is damaged: {why}"
    return why


def read_spec(fd: int) -> DeviceSpec:
    """The device that a readable file's header describes."""
    return spec_of(os.pread(fd, w.HEADER_WORDS * w.WORD_BYTES, 0))


def spec_of(head: bytes | memoryview) -> DeviceSpec:
    """The device that a header describes."""
    words = memoryview(head)[: w.HEADER_WORDS * w.WORD_BYTES].cast("q")
    cap_bytes = words[w.H_CAP]
    return DeviceSpec(
        uuid=w.get_text(head, w.H_UUID, w.UUID_BYTES),
        backend=w.get_text(head, w.H_BACKEND, w.BACKEND_BYTES),
        name=w.get_text(head, w.H_NAME, w.NAME_BYTES),
        total_bytes=words[w.H_TOTAL],
        margin_bytes=words[w.H_MARGIN],
        budget_cap_bytes=None if cap_bytes == w.NONE else cap_bytes,
        granularity_bytes=words[w.H_GRANULARITY],
    )


def difference(found: DeviceSpec, expected: DeviceSpec) -> str | None:
    """What keeps a process that expects one device from using another's ledger, or None."""
    for what, has, want in (
        ("device", found.uuid, expected.uuid),
        ("backend", found.backend, expected.backend),
        ("granularity", found.granularity_bytes, expected.granularity_bytes),
    ):
        if has != want:
            return f"its {what} is {has}, here it is {want}"
    for what, has_bytes, want_bytes in (
        ("total", found.total_bytes, expected.total_bytes),
        ("margin (KVTIDE_MARGIN)", found.margin_bytes, expected.margin_bytes),
        ("cap (KVTIDE_BUDGET)", found.budget_cap_bytes, expected.budget_cap_bytes),
    ):
        # Without a cap of one's own one lives with the cap that the creator of the file chose.
        if want_bytes is not None and has_bytes != want_bytes:
            has_text = "none" if has_bytes is None else format_size(has_bytes)
            return f"its {what} is {has_text}, here it is {format_size(want_bytes)}"
    return None


def _initialise(fd: int, path: Path, spec: DeviceSpec) -> None:
    raw = bytearray(w.FILE_BYTES)
    view = memoryview(raw)
    words = view.cast("q")
    words[w.H_LAYOUT] = w.LAYOUT
    words[w.H_TOTAL] = spec.total_bytes
    words[w.H_MARGIN] = spec.margin_bytes
    words[w.H_CAP] = w.NONE if spec.budget_cap_bytes is None else spec.budget_cap_bytes
    words[w.H_GRANULARITY] = spec.granularity_bytes
    w.put_text(view, w.H_UUID, w.UUID_BYTES, spec.uuid)
    w.put_text(view, w.H_BACKEND, w.BACKEND_BYTES, spec.backend)
    w.put_text(view, w.H_NAME, w.NAME_BYTES, spec.name)
    # Generations begin at random, so that a key into the file's former life fits no record.
    for at in (
        *map(w.instance_at, range(w.MAX_INSTANCES)),
        *map(w.pool_at, range(w.MAX_POOLS)),
    ):
        words[at] = secrets.randbits(39) * 2
    try:
        # Never shorter on the way: some process may have the former life mapped. And all of it
        # allocated now: a store into a hole of a full filesystem would be a SIGBUS.
        os.ftruncate(fd, w.FILE_BYTES)
        os.posix_fallocate(fd, 0, w.FILE_BYTES)
        _write(fd, memoryview(bytes(w.WORD_BYTES)), 0)
        _write(fd, view[w.WORD_BYTES :], w.WORD_BYTES)
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be written ({error.strerror}); it needs {w.FILE_BYTES} "
            "bytes: make room there or set another KVTIDE_DIR"
        ) from error
    words[w.H_MAGIC] = w.MAGIC
    _write(fd, view[: w.WORD_BYTES], 0)


def _write(fd: int, data: memoryview, at_byte: int) -> None:
    while data:
        written = os.pwrite(fd, data, at_byte)
        data, at_byte = data[written:], at_byte + written
