"""An engine's place on its devices, and what it wishes for there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvtide.ledger import Instance, Ledger

__all__ = ["Seat", "Wish"]


@dataclass(frozen=True, slots=True)
class Seat:
    """The engine's place on one device: its ledger and its record there."""

    ledger: Ledger
    instance: Instance


class Wish:
    """One unmet need on all devices of an engine; refusals in a row are one, of the largest."""

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        self._seats = seats
        self._bytes: dict[str, int] = {}

    @property
    def made(self) -> bool:
        """Whether something is wished for."""
        return bool(self._bytes)

    def make(self, bytes_of_device: Mapping[str, int]) -> None:
        """Wish for at least so much; every call wakes the holders who should give something."""
        for uuid, seat in self._seats.items():
            wanted_bytes = max(bytes_of_device.get(uuid, 0), self._bytes.get(uuid, 0))
            self._bytes[uuid] = wanted_bytes
            seat.instance.wish(wanted_bytes)

    def end(self) -> None:
        """It is no longer needed, or has come."""
        if self._bytes:
            self._bytes.clear()
            for seat in self._seats.values():
                seat.instance.wish(0)
