"""Handles of one account of memory: created, mapped, taken back, or else quarantined."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvtide.device.base import Device, Handle
from kvtide.errors import DeviceError
from kvtide.memory.transaction import Transaction

__all__ = ["Backing", "Meter", "Quarantined"]

_log = logging.getLogger(__name__)


class Meter(Protocol):
    """Told of every create and release, in the order that an account of memory needs."""

    def created(self, size_bytes: int) -> None:
        """So many bytes have just been created."""

    def released(self, size_bytes: int) -> None:
        """So many bytes are about to be released."""


class Quarantined(NamedTuple):
    """Memory that the device did not take back: still created, still counted, never used again.

    `addresses` are where it is still mapped.
    """

    handle: Handle
    addresses: tuple[int, ...]


class Backing:
    """What an arena holds of a device. Taking back never raises: what fails is quarantined."""

    def __init__(self, device: Device, meter: Meter) -> None:
        self.device = device
        self._meter = meter
        self._quarantine: set[Handle] = set()
        # Mappings that the device did not undo; of memory in quarantine, but also of an extent in
        # use that a split which failed could not unmap from its second place.
        self._stuck: dict[Handle, set[int]] = {}

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """What the device did not take back."""
        return tuple(
            Quarantined(handle, tuple(sorted(self._stuck.get(handle, ()))))
            for handle in self._quarantine
        )

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that the device did not take back."""
        return sum(handle.size_bytes for handle in self._quarantine)

    def create(self, size_bytes: int, change: Transaction) -> Handle | None:
        """Take memory, as a step of a change; None when the device has not so much."""
        handle = self.device.create(size_bytes)
        if handle is not None:
            self._meter.created(size_bytes)
            change.undo_by(self.release, handle)
        return handle

    def map(self, address: int, handle: Handle, change: Transaction) -> None:
        """Map memory, as a step of a change."""
        self.device.map(address, handle)
        change.undo_by(self.unmap, address, handle)

    def unmap(self, address: int, handle: Handle) -> None:
        """Unmap; where that fails, the addresses are blocked and the memory cannot be released."""
        try:
            self.device.unmap(address, handle)
        except DeviceError as error:
            _log.warning("%d bytes stay mapped: %s", handle.size_bytes, error)
            self._stuck.setdefault(handle, set()).add(address)

    def release(self, handle: Handle) -> None:
        """Release, or quarantine what fails or is still mapped somewhere."""
        if handle in self._stuck:
            self.quarantine(handle)
        if handle in self._quarantine:
            return
        self._meter.released(handle.size_bytes)
        try:
            self.device.release(handle)
        except DeviceError as error:
            self._meter.created(handle.size_bytes)
            _log.warning("%d bytes are not released: %s", handle.size_bytes, error)
            self.quarantine(handle)

    def take_back(self, address: int, handle: Handle) -> bool:
        """Unmap and release, or else leave it where it is; whether it is gone.

        Raises
        ------
        DeviceError
            It was unmapped, and could neither be released nor mapped again.
        """
        if handle in self._stuck:
            # Mapped at a second place as well.
            return False
        try:
            self.device.unmap(address, handle)
        except DeviceError as error:
            _log.warning("%d bytes stay mapped: %s", handle.size_bytes, error)
            return False
        self._meter.released(handle.size_bytes)
        try:
            self.device.release(handle)
        except DeviceError as error:
            self._meter.created(handle.size_bytes)
            _log.warning("%d bytes are not released: %s", handle.size_bytes, error)
            try:
                self.device.map(address, handle)
            except DeviceError:
                self.quarantine(handle)
                raise
            return False
        return True

    def quarantine(self, handle: Handle) -> None:
        """Set memory aside that nothing uses any more and that may still be mapped somewhere."""
        self._quarantine.add(handle)

    def retry(self) -> int:
        """Try again to take back what is quarantined; bytes that are gone now."""
        stuck, self._stuck = self._stuck, {}
        for handle, addresses in stuck.items():
            for address in addresses:
                self.unmap(address, handle)
        retried, self._quarantine = self._quarantine, set()
        for handle in retried:
            self.release(handle)
        return sum(handle.size_bytes for handle in retried) - self.quarantined_bytes

    def blocks(self, runs: Iterable[tuple[int, int]]) -> bool:
        """Whether memory that could not be unmapped is in any of these (address, size)."""
        return any(
            at < address + size_bytes and address < at + handle.size_bytes
            for handle, addresses in self._stuck.items()
            for at in addresses
            for address, size_bytes in runs
        )
