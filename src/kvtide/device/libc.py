"""The kernel's memory calls that Python does not have, each with its argument types set once."""

from __future__ import annotations

import ctypes
import errno
import mmap as _mmap
import os

from kvtide.errors import DeviceError

__all__ = ["allocate", "map_shared", "protect", "reserve", "shmem_bound", "unmap"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_KEEP_SIZE = 0x1
_PUNCH_HOLE = 0x2
_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = _mmap.PROT_READ | _mmap.PROT_WRITE
_NOTHING = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_PROT_NONE = 0


class _SysInfo(ctypes.Structure):
    _fields_ = (
        ("uptime", ctypes.c_long),
        ("loads", ctypes.c_ulong * 3),
        ("totalram", ctypes.c_ulong),
        ("freeram", ctypes.c_ulong),
        ("sharedram", ctypes.c_ulong),
        ("bufferram", ctypes.c_ulong),
        ("totalswap", ctypes.c_ulong),
        ("freeswap", ctypes.c_ulong),
        ("procs", ctypes.c_ushort),
        ("pad", ctypes.c_ushort),
        ("totalhigh", ctypes.c_ulong),
        ("freehigh", ctypes.c_ulong),
        ("mem_unit", ctypes.c_uint),
        ("reserved", ctypes.c_char * 64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_c_mmap = _libc.mmap
_c_mmap.restype = ctypes.c_void_p
_c_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_c_munmap = _libc.munmap
_c_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_c_madvise = _libc.madvise
_c_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_c_fallocate = _libc.fallocate
_c_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_c_sysinfo = _libc.sysinfo
_c_sysinfo.argtypes = (ctypes.c_void_p,)

_sysinfo = _SysInfo()
_sysinfo_address = ctypes.addressof(_sysinfo)
# The kernel batches this counter by up to 125 pages a CPU and NUMA node; four nodes are assumed.
_SHMEM_SLACK_BYTES = os.sysconf("SC_NPROCESSORS_CONF") * 4 * 125 * os.sysconf("SC_PAGE_SIZE")


def _fail(call: str, what: str) -> DeviceError:
    number = ctypes.get_errno()
    hint = ""
    if number == errno.ENOMEM:
        hint = "; the process may be at its limit of mappings: raise vm.max_map_count, or ulimit -v"
    return DeviceError(f"{call} failed for {what}: {os.strerror(number)}{hint}")


def reserve(size_bytes: int, alignment_bytes: int) -> int:
    """Reserve addresses that fault on every access; the first one, aligned.

    Raises
    ------
    DeviceError
        The address space does not have so much.
    """
    asked = size_bytes + alignment_bytes
    raw = _c_mmap(None, asked, _PROT_NONE, _NOTHING, -1, 0)
    if raw == _FAILED:
        raise _fail("mmap", f"a reservation of {size_bytes} bytes")
    address = int(-(-raw // alignment_bytes) * alignment_bytes)
    if address > raw:
        unmap(raw, address - raw)
    tail_bytes = raw + asked - (address + size_bytes)
    if tail_bytes:
        unmap(address + size_bytes, tail_bytes)
    return address


def protect(address: int, size_bytes: int) -> None:
    """Put inaccessible addresses in the place of whatever was mapped there."""
    if _c_mmap(address, size_bytes, _PROT_NONE, _NOTHING | _MAP_FIXED, -1, 0) == _FAILED:
        raise _fail("mmap", f"unmapping {size_bytes} bytes at {address:#x}")


def unmap(address: int, size_bytes: int) -> None:
    """Give addresses back to the process."""
    if _c_munmap(address, size_bytes) != 0:
        raise _fail("munmap", f"{size_bytes} bytes at {address:#x}")


def map_shared(address: int, size_bytes: int, descriptor: int, offset: int) -> None:
    """Map a file at exactly these addresses, for this process alone and no child of it."""
    flags = _mmap.MAP_SHARED | _MAP_FIXED
    if _c_mmap(address, size_bytes, _READ_WRITE, flags, descriptor, offset) == _FAILED:
        raise _fail("mmap", f"mapping {size_bytes} bytes at {address:#x}")
    if _c_madvise(address, size_bytes, _MADV_DONTFORK) != 0:
        error = _fail("madvise", f"{size_bytes} bytes at {address:#x}")
        protect(address, size_bytes)
        raise error


def allocate(descriptor: int, offset: int, size_bytes: int, *, punch: bool = False) -> bool:
    """Back a part of a file with memory, or take that memory away (`punch`).

    Returns
    -------
    bool
        False when there is not so much memory; nothing was taken then.

    Raises
    ------
    DeviceError
        The kernel refuses for another reason.
    """
    mode = _KEEP_SIZE | _PUNCH_HOLE if punch else _KEEP_SIZE
    while _c_fallocate(descriptor, mode, offset, size_bytes) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.ENOSPC, errno.ENOMEM) and not punch:
            return False
        raise _fail("fallocate", f"{size_bytes} bytes {'given back' if punch else 'asked for'}")
    return True


def shmem_bound() -> int:
    """Bytes that all shared memory of the machine together is certainly not above; about 1 us.

    0 where the kernel does not tell.
    """
    if _c_sysinfo(_sysinfo_address) != 0 or _sysinfo.sharedram == 0:
        return 0
    pages = _sysinfo.sharedram + _sysinfo.totalswap - _sysinfo.freeswap
    return int(pages * _sysinfo.mem_unit) + _SHMEM_SLACK_BYTES
