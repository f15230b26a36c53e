"""An arena against a model that is a set of granules with a value in each."""

import ctypes
import itertools
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from faulty import FaultyDevice
from kvtide.device.host import HostDevice
from kvtide.errors import DeviceError
from kvtide.memory import Arena, Span, cut
from kvtide.units import MIB
from memory_invariants import CountingMeter, assert_conserved

GRANULE = 2 * MIB
GRANULES = 16
DEVICE_GRANULES = 12
NUMBERS = itertools.count()
ranges = st.builds(
    lambda at, size: (at, min(at + size, GRANULES)), st.integers(0, GRANULES - 1), st.integers(1, 8)
)


def span(start: int, end: int) -> Span:
    return Span(start * GRANULE, (end - start) * GRANULE)


class ArenaMachine(RuleBasedStateMachine):
    """Any order of growing, shrinking, splitting and failures.

    The model: `extents` maps a first granule to how many there are; `values` has the value that
    was written into each granule; nothing else is known to be mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        uuid = f"machine-{os.getpid()}-{next(NUMBERS)}"
        self.host = HostDevice(DEVICE_GRANULES * GRANULE, uuid=uuid)
        self.device = FaultyDevice(self.host)
        self.meter = CountingMeter()
        self.arena = Arena(self.device, GRANULES * GRANULE, self.meter)
        self.extents: dict[int, int] = {}
        self.values: dict[int, int] = {}
        self.next_value = 1

    def teardown(self) -> None:
        self.device.disarm()
        self.arena.close()
        assert self.meter.held_bytes == 0
        self.host.close()

    def _room(self) -> int:
        return DEVICE_GRANULES - self.meter.held_bytes // GRANULE

    def _write(self, granule: int) -> None:
        self.next_value = self.next_value % 255 + 1
        self.values[granule] = self.next_value
        # Both ends tell whether a copy was whole; filling all of it would only be slower.
        for at in (granule * GRANULE, (granule + 1) * GRANULE - 1):
            ctypes.memset(self.arena.address + at, self.next_value, 1)

    def _grown(self, spans: list[Span]) -> None:
        for one in spans:
            first, count = one.offset_bytes // GRANULE, one.size_bytes // GRANULE
            self.extents[first] = count
            for granule in range(first, first + count):
                assert self._read(granule) == (0, 0)
                self._write(granule)

    def _read(self, granule: int) -> tuple[int, int]:
        address = self.arena.address + granule * GRANULE
        return (
            ctypes.string_at(address, 1)[0],
            ctypes.string_at(address + GRANULE - 1, 1)[0],
        )

    @rule(wanted=ranges, cap=st.sampled_from([1, 2, 4]))
    def grow(self, wanted, cap):
        spans = cut([span(*wanted)], cap * GRANULE)
        if self.values.keys() & set(range(*wanted)):
            with pytest.raises(ValueError, match="mapped already"):
                self.arena.grow(spans)
        elif wanted[1] - wanted[0] > self._room():
            assert not self.arena.grow(spans)
        else:
            assert self.arena.grow(spans)
            self._grown(spans)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def shrink(self, data):
        firsts = data.draw(
            st.lists(st.sampled_from(sorted(self.extents)), unique=True, min_size=1, max_size=3)
        )
        self.arena.shrink([span(at, at + self.extents[at]) for at in firsts])
        self._gone(firsts)

    def _gone(self, firsts: list[int]) -> None:
        for first in firsts:
            for granule in range(first, first + self.extents.pop(first)):
                del self.values[granule]

    @precondition(lambda self: self.extents)
    @rule(data=st.data(), fault=st.none() | st.integers(0, 12))
    def split(self, data, fault):
        first = data.draw(st.sampled_from(sorted(self.extents)))
        count = self.extents[first]
        kept = data.draw(
            st.lists(st.integers(first, first + count - 1), unique=True, min_size=1).map(sorted)
        )
        room = self._room()
        if fault is not None:
            self.device.arm(lambda at, verb: at == fault)
        done = self.arena.split(span(first, first + count), [span(at, at + 1) for at in kept])
        self.device.disarm()
        if fault is None:
            assert done == (count == 1 or len(kept) <= room)
        if not done:
            return
        self.extents.pop(first)
        self.extents.update(dict.fromkeys(kept, 1))
        for granule in set(range(first, first + count)) - set(kept):
            del self.values[granule]
        self.arena.retry_quarantined()

    @rule(wanted=ranges, fault=st.integers(0, 8))
    def grow_with_a_failure(self, wanted, fault):
        if self.values.keys() & set(range(*wanted)) or wanted[1] - wanted[0] > self._room():
            return
        spans = cut([span(*wanted)], 2 * GRANULE)
        self.device.arm(lambda at, verb: at == fault)
        try:
            done = self.arena.grow(spans)
        except DeviceError:
            done = False
        self.device.disarm()
        assert done == (fault >= 2 * len(spans))
        if done:
            self._grown(spans)

    @invariant()
    def the_arena_is_as_the_model(self):
        assert self.arena.extents == tuple(
            span(at, at + count) for at, count in sorted(self.extents.items())
        )
        assert {at: self._read(at) for at in self.values} == {
            at: (value, value) for at, value in self.values.items()
        }
        assert self.arena.quarantined_bytes == 0
        assert_conserved(self.arena, self.meter)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
