"""A device on paper: what lies in its memory is kept by address, and every misuse is an error.

Memory that was created and not written holds garbage, and reading where nothing is mapped fails.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from kvtide.device.base import DeviceInfo, Handle
from kvtide.units import MIB

GRANULE = 2 * MIB
GARBAGE = object()


class PaperMemory:
    """The physical memory of one device, shared by all who open it; `foreign_bytes` is others'."""

    def __init__(self, uuid: str, total_bytes: int) -> None:
        self.uuid = uuid
        self.total_bytes = total_bytes
        self.held_bytes = 0
        self.foreign_bytes = 0

    def open(self) -> PaperDevice:
        return PaperDevice(self)

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.held_bytes - self.foreign_bytes)

    def close(self) -> None:
        return None


class _Fence:
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class PaperDevice:
    """One process's opening of a memory. `before_create` is told of every create beforehand."""

    def __init__(self, memory: PaperMemory) -> None:
        self.memory = memory
        self.before_create: Callable[[int], None] = lambda size_bytes: None
        self._info = DeviceInfo(memory.uuid, "host", "paper", memory.total_bytes, GRANULE)
        self._next_address, self._next_token = GRANULE, 1
        self._contents: dict[int, dict[int, object]] = {}
        self._sizes: dict[int, int] = {}
        self._places: dict[int, set[int]] = {}
        self._mapped: dict[int, Handle] = {}
        self._starts: list[int] = []

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def reserve(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += size_bytes + GRANULE
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        assert not any(address <= at < address + size_bytes for at in self._mapped)

    def create(self, size_bytes: int) -> Handle | None:
        assert size_bytes > 0
        assert size_bytes % GRANULE == 0
        self.before_create(size_bytes)
        if size_bytes > self.memory.free_bytes:
            return None
        self.memory.held_bytes += size_bytes
        handle = Handle(size_bytes, self._next_token)
        self._next_token += 1
        self._contents[handle.token] = {}
        self._places[handle.token] = set()
        return handle

    def map(self, address: int, handle: Handle) -> None:
        for at, other in self._mapped.items():
            assert address + handle.size_bytes <= at or at + other.size_bytes <= address
        self._mapped[address] = handle
        self._starts = sorted(self._mapped)
        self._places[handle.token].add(address)

    def unmap(self, address: int, handle: Handle) -> None:
        assert self._mapped.pop(address) is handle
        self._starts = sorted(self._mapped)
        self._places[handle.token].discard(address)

    def release(self, handle: Handle) -> None:
        assert not self._places.pop(handle.token), "released while mapped"
        del self._contents[handle.token]
        self.memory.held_bytes -= handle.size_bytes

    def _at(self, address: int) -> tuple[dict[int, object], int]:
        index = bisect_right(self._starts, address) - 1
        assert index >= 0, f"nothing is mapped at {address:#x}"
        start = self._starts[index]
        handle = self._mapped[start]
        assert address < start + handle.size_bytes, f"nothing is mapped at {address:#x}"
        return self._contents[handle.token], address - start

    def write(self, address: int, value: object) -> None:
        contents, offset = self._at(address)
        contents[offset] = value

    def read(self, address: int) -> object:
        contents, offset = self._at(address)
        return contents.get(offset, GARBAGE)

    def zero(self, runs) -> None:
        granules = [at for start, size in runs for at in range(start, start + size, GRANULE)]
        for at in granules:
            contents, offset = self._at(at)
            for key in [k for k in contents if offset <= k < offset + GRANULE]:
                del contents[key]

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        for at in range(0, size_bytes, GRANULE):
            found, offset = self._at(source + at)
            part = {k - offset: v for k, v in found.items() if offset <= k < offset + GRANULE}
            target, base = self._at(destination + at)
            for key in [k for k in target if base <= k < base + GRANULE]:
                del target[key]
            target.update({base + k: v for k, v in part.items()})

    def fence(self) -> _Fence:
        return _Fence()

    def free_bytes(self) -> int:
        return self.memory.free_bytes

    def close(self) -> None:
        return None
