"""A device whose calls are timed: the verbs of another one, each into a histogram."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

from kvtide.device.base import Device, DeviceInfo, Fence, Handle
from kvtide.observe.tally import Tally, Verb

__all__ = ["TimedDevice"]

_now = time.perf_counter_ns


class TimedDevice:
    """Wraps a device. What fails is not timed, and nothing counts before it is told."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._took: defaultdict[int, list[int]] = defaultdict(list)

    def tell(self, tally: Tally | None) -> None:
        """Put the times since the last call into a tally: together, not between the calls."""
        if tally is not None:
            for verb, took_ns in self._took.items():
                tally.time(verb, *took_ns)
        self._took.clear()

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        return self._device.info

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses; not timed, as it happens at the start alone."""
        return self._device.reserve(size_bytes)

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Give back a reservation."""
        self._device.unreserve(address, size_bytes)

    def create(self, size_bytes: int) -> Handle | None:
        """Take physical memory."""
        begun = _now()
        handle = self._device.create(size_bytes)
        self._took[Verb.CREATE].append(_now() - begun)
        return handle

    def map(self, address: int, handle: Handle) -> None:
        """Put a handle at reserved addresses."""
        begun = _now()
        self._device.map(address, handle)
        self._took[Verb.MAP].append(_now() - begun)

    def unmap(self, address: int, handle: Handle) -> None:
        """Take a handle from its addresses."""
        begun = _now()
        self._device.unmap(address, handle)
        self._took[Verb.UNMAP].append(_now() - begun)

    def release(self, handle: Handle) -> None:
        """Give physical memory back."""
        begun = _now()
        self._device.release(handle)
        self._took[Verb.RELEASE].append(_now() - begun)

    def zero(self, runs: Sequence[tuple[int, int]]) -> None:
        """Fill memory with zeros; on a GPU the time to queue that."""
        begun = _now()
        self._device.zero(runs)
        self._took[Verb.ZERO].append(_now() - begun)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy memory; on a GPU the time to queue that."""
        begun = _now()
        self._device.copy(destination, source, size_bytes)
        self._took[Verb.COPY].append(_now() - begun)

    def fence(self) -> Fence:
        """Mark this point in the engine's work."""
        return self._device.fence()

    def free_bytes(self) -> int:
        """What nobody holds now."""
        return self._device.free_bytes()

    def close(self) -> None:
        """Close the device."""
        self._device.close()
