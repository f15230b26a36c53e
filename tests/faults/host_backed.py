"""Devices for engines of tests as `paper_device` has them, but real: the machine's own memory."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable

from kvtide.device.base import Handle
from kvtide.device.host import HostDevice
from paper_device import GRANULE


def _byte(value: object) -> int:
    return 0 if value is None else zlib.crc32(repr(value).encode()) % 255 + 1


class _Found:
    """A byte of memory; equal to what would have been written as that byte."""

    def __init__(self, byte: int) -> None:
        self.byte = byte

    def __eq__(self, other: object) -> bool:
        return self.byte == _byte(other)

    __hash__ = None  # type: ignore[assignment]


class HostMemory:
    """One host device's memory in this process; all figures are the kernel's own."""

    def __init__(self, uuid: str, total_bytes: int) -> None:
        self.uuid = f"{uuid}-{os.getpid()}"
        self.total_bytes = total_bytes
        self._devices: list[HostBacked] = []
        self._ballast = HostDevice(total_bytes, uuid=self.uuid)
        self._handles: list[Handle] = []

    def open(self) -> HostBacked:
        self._devices.append(HostBacked(self))
        return self._devices[-1]

    @property
    def held_bytes(self) -> int:
        return sum(_blocks_bytes(device.device) for device in self._devices)

    @property
    def foreign_bytes(self) -> int:
        return _blocks_bytes(self._ballast)

    @foreign_bytes.setter
    def foreign_bytes(self, size_bytes: int) -> None:
        while len(self._handles) * GRANULE > size_bytes:
            self._ballast.release(self._handles.pop())
        while len(self._handles) * GRANULE < size_bytes and self.free_bytes:
            handle = self._ballast.create(GRANULE)
            if handle is None:
                break
            self._handles.append(handle)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.held_bytes - self.foreign_bytes

    def close(self) -> None:
        self.foreign_bytes = 0
        for device in (self._ballast, *(d.device for d in self._devices)):
            # What an injected fault left behind goes with the descriptor.
            device._places.clear()
            for address, size_bytes in list(device._reserved.items()):
                device._mapped.clear()
                device.unreserve(address, size_bytes)
            device.close()


def _blocks_bytes(device: HostDevice) -> int:
    return 0 if device._descriptor < 0 else os.fstat(device._descriptor).st_blocks * 512


class HostBacked:
    """One rank's opening of a host device; writes and reads single bytes of what is mapped."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.device = HostDevice(memory.total_bytes, uuid=memory.uuid)
        self.before_create: Callable[[int], None] = lambda size_bytes: None
        for verb in ("info", "reserve", "unreserve", "map", "unmap", "release", "zero", "copy"):
            setattr(self, verb, getattr(self.device, verb))
        self.fence = self.device.fence

    def create(self, size_bytes: int) -> Handle | None:
        self.before_create(size_bytes)
        return self.device.create(size_bytes)

    def free_bytes(self) -> int:
        return self.memory.free_bytes

    def write(self, address: int, value: object) -> None:
        ctypes.c_ubyte.from_address(address).value = _byte(value)

    def read(self, address: int) -> _Found:
        return _Found(ctypes.c_ubyte.from_address(address).value)

    def close(self) -> None:
        return None
