"""Invariants of arenas that unit, property and fault tests assert alike."""

from kvtide.device.census import used_bytes
from kvtide.memory import Arena


class CountingMeter:
    """What an account of memory sees: two monotone counts."""

    def __init__(self) -> None:
        self.created_bytes = 0
        self.released_bytes = 0

    def created(self, size_bytes: int) -> None:
        assert size_bytes > 0
        self.created_bytes += size_bytes

    def released(self, size_bytes: int) -> None:
        assert size_bytes > 0
        self.released_bytes += size_bytes
        assert self.released_bytes <= self.created_bytes

    @property
    def held_bytes(self) -> int:
        return self.created_bytes - self.released_bytes


def assert_no_overlap(arena: Arena) -> None:
    at = 0
    for extent in arena.extents:
        assert extent.offset_bytes >= at
        assert extent.size_bytes > 0
        at = extent.end_bytes
    assert at <= arena.size_bytes


def assert_conserved(arena: Arena, meter: CountingMeter) -> None:
    """Mapped and quarantined memory is all there is: to the meter and to the kernel."""
    assert_no_overlap(arena)
    assert arena.mapped_bytes == sum(extent.size_bytes for extent in arena.extents)
    assert meter.held_bytes == arena.mapped_bytes + arena.quarantined_bytes
    assert used_bytes(arena.device.info.uuid) == meter.held_bytes
