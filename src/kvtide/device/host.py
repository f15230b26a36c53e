"""The host device: memory of the machine itself, as strict as a GPU's."""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left, insort
from collections.abc import Sequence

from kvtide.device import census, libc
from kvtide.device.base import DeviceInfo, Fence, Handle
from kvtide.errors import DeviceError
from kvtide.units import MIB, format_size

__all__ = ["HOST_UUID", "HostDevice"]

HOST_UUID = "host"
_GRANULARITY_BYTES = 2 * MIB
# Offsets are handed out once: a stale mapping can never show another handle's memory. 4 EiB of
# sparse file outlast any process.
_FILE_BYTES = 1 << 62


class _PassedFence:
    """The host computes on the calling thread, so whatever was asked before is done."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostDevice:
    """Handles are parts of one memfd; this process's whole holding is one descriptor.

    `create` allocates in the kernel, `map` is MAP_FIXED into addresses that otherwise fault, and
    what is free is what the kernel says of the memfds of all processes. A child gets none of it:
    the mappings are not inherited, the descriptor is closed, and the addresses fault there.

    Parameters
    ----------
    total_bytes
        Size of the device, the same in all processes that share it.
    uuid
        Which host device; `host` but in tests.

    Raises
    ------
    DeviceError
        This machine has no memfd, or the size is less than one handle.
    """

    def __init__(self, total_bytes: int, *, uuid: str = HOST_UUID) -> None:
        if total_bytes < _GRANULARITY_BYTES:
            raise DeviceError(
                f"a host device of {format_size(total_bytes)} holds no memory: give it at least "
                f"{format_size(_GRANULARITY_BYTES)} (KVTIDE_HOST_MEMORY)"
            )
        self._info = DeviceInfo(
            uuid=uuid,
            backend="host",
            name="host memory",
            total_bytes=total_bytes,
            granularity_bytes=_GRANULARITY_BYTES,
            creates_zeros=True,
        )
        self._descriptor = _open_memfd(uuid)
        self._next_offset = 0
        self._held_bytes = 0
        self._reserved: dict[int, int] = {}
        self._places: dict[int, set[int]] = {}
        self._mapped: list[tuple[int, int]] = []
        _open_devices.add(self)

    @property
    def info(self) -> DeviceInfo:
        """What this device is."""
        return self._info

    @property
    def held_bytes(self) -> int:
        """Bytes that this process created and did not release yet."""
        return self._held_bytes

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses that fault on every access."""
        self._check_open()
        _check_size(size_bytes)
        address = libc.reserve(size_bytes, _GRANULARITY_BYTES)
        self._reserved[address] = size_bytes
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Give back a whole reservation in which nothing is mapped."""
        assert self._reserved.get(address) == size_bytes, "not a reservation of this device"
        assert not self._is_mapped(address, size_bytes), "unreserved while mapped"
        libc.unmap(address, size_bytes)
        del self._reserved[address]

    def create(self, size_bytes: int) -> Handle | None:
        """Take memory, or None when the device or the machine has not so much.

        The kernel's figure is held against the total before and after, so that two processes
        that create at once never both stay above it (both may be refused).
        """
        self._check_open()
        _check_size(size_bytes)
        if not self._has_room(size_bytes):
            return None
        offset = self._next_offset
        if not libc.allocate(self._descriptor, offset, size_bytes):
            return None
        self._next_offset += size_bytes
        self._held_bytes += size_bytes
        handle = Handle(size_bytes, offset)
        self._places[offset] = set()
        fits = False
        try:
            fits = self._has_room(0)
        finally:
            if not fits:
                self.release(handle)
        return handle if fits else None

    def map(self, address: int, handle: Handle) -> None:
        """Put a handle at reserved addresses, readable and writable."""
        self._check_open()
        size_bytes = handle.size_bytes
        if address % _GRANULARITY_BYTES or not self._is_reserved(address, size_bytes):
            raise DeviceError(f"{size_bytes} bytes at {address:#x} are not reserved")
        if self._is_mapped(address, size_bytes):
            raise DeviceError(f"something is mapped already in {size_bytes} bytes at {address:#x}")
        libc.map_shared(address, size_bytes, self._descriptor, handle.token)
        self._places[handle.token].add(address)
        insort(self._mapped, (address, size_bytes))

    def unmap(self, address: int, handle: Handle) -> None:
        """Take the whole handle from these addresses, which fault again from then on."""
        self._check_open()
        assert address in self._places[handle.token], f"not mapped at {address:#x}"
        libc.protect(address, handle.size_bytes)
        self._places[handle.token].discard(address)
        del self._mapped[bisect_left(self._mapped, (address, handle.size_bytes))]

    def release(self, handle: Handle) -> None:
        """Give memory back to the kernel; it is gone when this returns."""
        self._check_open()
        # Touching a hole of a mapped memfd would silently take memory again.
        assert not self._places[handle.token], "released while mapped"
        libc.allocate(self._descriptor, handle.token, handle.size_bytes, punch=True)
        del self._places[handle.token]
        self._held_bytes -= handle.size_bytes

    def zero(self, runs: Sequence[tuple[int, int]]) -> None:
        """Fill mapped memory with zeros."""
        for address, size_bytes in runs:
            ctypes.memset(address, 0, size_bytes)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy mapped memory; the ranges may overlap."""
        ctypes.memmove(destination, source, size_bytes)

    def fence(self) -> Fence:
        """A fence that has passed already."""
        return _PassedFence()

    def free_bytes(self) -> int:
        """Total less what the kernel says that all processes hold of this device."""
        return max(0, self._info.total_bytes - census.used_bytes(self._info.uuid))

    def close(self) -> None:
        """Close the descriptor. Everything must have been released and unreserved before."""
        if self._descriptor < 0:
            return
        assert not self._places, f"{len(self._places)} handles are not released"
        assert not self._reserved, f"{len(self._reserved)} reservations are still there"
        os.close(self._descriptor)
        self._descriptor = -1
        _open_devices.discard(self)

    def _is_reserved(self, address: int, size_bytes: int) -> bool:
        end = address + size_bytes
        return any(start <= address and end <= start + n for start, n in self._reserved.items())

    def _is_mapped(self, address: int, size_bytes: int) -> bool:
        after = bisect_left(self._mapped, (address + size_bytes, 0))
        return after > 0 and sum(self._mapped[after - 1]) > address

    def _has_room(self, size_bytes: int) -> bool:
        total_bytes = self._info.total_bytes
        # All shared memory of the machine is a bound that one system call tells; most creates
        # need no look into every process. Not trusted where it misses what this process holds.
        bound_bytes = libc.shmem_bound()
        if bound_bytes >= self._held_bytes > 0 and bound_bytes + size_bytes <= total_bytes:
            return True
        return census.used_bytes(self._info.uuid) + size_bytes <= total_bytes

    def _check_open(self) -> None:
        if self._descriptor < 0:
            raise DeviceError(
                "this host device is closed, or was opened before a fork: open it in the child"
            )

    def _forget_in_child(self) -> None:
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        for address, size_bytes in self._reserved.items():
            libc.protect(address, size_bytes)


def _open_memfd(uuid: str) -> int:
    try:
        descriptor = os.memfd_create(census.memfd_name(uuid))
    except (AttributeError, OSError) as error:
        raise DeviceError(
            f"the host device needs memfd_create, which this machine refuses ({error}): use Linux "
            "3.17 or newer with a Python built for it, and a sandbox that allows the call"
        ) from error
    os.ftruncate(descriptor, _FILE_BYTES)
    return descriptor


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % _GRANULARITY_BYTES:
        raise DeviceError(f"{size_bytes!r} bytes is not a multiple of {_GRANULARITY_BYTES}")


# Strong: a device that is dropped without being closed still holds its memory.
_open_devices: set[HostDevice] = set()


def _after_in_child() -> None:
    for device in _open_devices:
        device._forget_in_child()
    _open_devices.clear()


os.register_at_fork(after_in_child=_after_in_child)
