"""What a device can do with physical memory: the verbs that host and CUDA share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Device", "DeviceInfo", "Fence", "Handle"]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is.

    Attributes
    ----------
    uuid
        `host`, or the driver's UUID (`GPU-...`; `MIG-...` for a slice).
    backend
        `host` or `cuda`.
    name
        For people, as the driver gives it.
    total_bytes
        Physical memory that all processes on the device share.
    granularity_bytes
        The smallest handle; handles and addresses are multiples of it (2 MiB).
    creates_zeros
        Whether a handle is all zeros when it is created; else it holds garbage.
    """

    uuid: str
    backend: str
    name: str
    total_bytes: int
    granularity_bytes: int
    creates_zeros: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """Physical memory that was created and not yet released. `token` is the backend's own."""

    size_bytes: int
    token: int


class Fence(Protocol):
    """A point in the device's queue of work."""

    def passed(self) -> bool:
        """Whether all work queued before the fence is done. Never waits."""

    def wait(self) -> None:
        """Wait until all work queued before the fence is done."""


class Device(Protocol):
    """One accounting domain of physical memory, opened in this process.

    Verbs raise `DeviceError` where the driver or kernel reports anything but lack of memory,
    which `create` answers with None.
    """

    @property
    def info(self) -> DeviceInfo:
        """What this device is."""

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses with nothing behind them, aligned to the granularity; the first one.

        A stray access to them faults; it never reads or writes anything.
        """

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Give back a whole reservation in which nothing is mapped."""

    def create(self, size_bytes: int) -> Handle | None:
        """Take physical memory, or None when there is not so much."""

    def map(self, address: int, handle: Handle) -> None:
        """Put a handle at reserved addresses, readable and writable. All or nothing."""

    def unmap(self, address: int, handle: Handle) -> None:
        """Take the whole handle from these addresses, which fault again from then on."""

    def release(self, handle: Handle) -> None:
        """Give physical memory back; it has left the process when this returns."""

    def zero(self, runs: Sequence[tuple[int, int]]) -> None:
        """Fill mapped memory with zeros, in order with the engine's own work on the device.

        `runs` are (address, size in bytes).
        """

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy mapped memory, in order with the engine's own work on the device."""

    def fence(self) -> Fence:
        """Mark this point in the engine's work on the device."""

    def free_bytes(self) -> int:
        """Physical memory nobody holds now, as the driver or kernel counts it."""

    def close(self) -> None:
        """Let go of what the opened device itself holds (contexts, descriptors)."""
