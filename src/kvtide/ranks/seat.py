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
        self._least: dict[str, int] = {}
        # When the waiting ends, in monotonic time, for observers; 0: never.
        self.until_ns = 0

    @property
    def made(self) -> bool:
        """Whether something is wished for."""
        return bool(self._bytes)

    def make(
        self,
        bytes_of_device: Mapping[str, int],
        least_of_device: Mapping[str, int] | None = None,
    ) -> None:
        """Wish for at least so much; every call wakes the holders who should give something.

        Without the least of it nothing goes on; if it is not given, without all of it. With 0 it
        holds nobody up.
        """
        largest = {
            uuid: max(bytes_of_device.get(uuid, 0), self._bytes.get(uuid, 0))
            for uuid in self._seats
        }
        self.renew(largest, least_of_device)

    def renew(
        self,
        bytes_of_device: Mapping[str, int],
        least_of_device: Mapping[str, int] | None = None,
    ) -> None:
        """Wish for just so much from now on, as `make` does otherwise."""
        for uuid, seat in self._seats.items():
            wanted_bytes = bytes_of_device.get(uuid, 0)
            self._bytes[uuid] = wanted_bytes
            least_bytes = min(wanted_bytes, (least_of_device or {}).get(uuid, wanted_bytes))
            self._least[uuid] = least_bytes
            seat.instance.wish(wanted_bytes, least_bytes=least_bytes, until_ns=self.until_ns)

    def came(self, bytes_of_device: Mapping[str, int]) -> None:
        """So much of it has come: the rest is wished for, and keeps its place in the queue."""
        if not self.made:
            return
        left, least = (
            {uuid: max(0, size - bytes_of_device.get(uuid, 0)) for uuid, size in sizes.items()}
            for sizes in (self._bytes, self._least)
        )
        self.renew(left, least)
        if not any(left.values()):
            self._bytes.clear()

    def end(self) -> None:
        """It is no longer needed, or has come."""
        if self._bytes:
            self._bytes.clear()
            for seat in self._seats.values():
                seat.instance.wish(0)
