"""An extent split by way of free granules: whole or not at all, whatever fails."""

import ctypes
import os

import pytest

from faulty import FaultyDevice
from kvtide.device.host import HostDevice
from kvtide.errors import DeviceError
from kvtide.memory import Arena, Span, carrying
from kvtide.memory.carrying import split_by_way_of
from kvtide.units import MIB
from memory_invariants import CountingMeter, assert_conserved

SIZE = 2 * MIB
EXTENT, OTHER = Span(0, 4 * SIZE), Span(4 * SIZE, 4 * SIZE)
KEEP = [Span(SIZE, SIZE), Span(3 * SIZE, SIZE)]
STAGING = (5 * SIZE, 7 * SIZE)


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(carrying, "_PAUSE_SECONDS", 0.0)
    device = HostDevice(8 * SIZE, uuid=f"test-carry-{os.getpid()}")
    faulty, meter = FaultyDevice(device, create_answers_none=True), CountingMeter()
    arena = Arena(faulty, 16 * SIZE, meter)
    assert arena.grow([EXTENT, OTHER])
    for granule in range(8):
        ctypes.memset(arena.address + granule * SIZE, granule + 1, 64)
    yield arena, faulty, meter
    faulty.disarm()
    arena.close()
    device.close()


def at(arena, granule):
    return ctypes.string_at(arena.address + granule * SIZE, 1)[0]


def test_what_is_kept_keeps_its_place_and_contents_on_a_full_device(opened):
    arena, faulty, meter = opened
    assert faulty.free_bytes() == 0
    assert split_by_way_of(arena, EXTENT, KEEP, STAGING)
    assert arena.extents == (*KEEP, OTHER)
    assert [at(arena, granule) for granule in (1, 3, 4, 6)] == [2, 4, 5, 7]
    assert_conserved(arena, meter)


@pytest.mark.parametrize("verb", ["copy", "fence", "unmap", "release"])
def test_a_failure_before_it_is_gone_changes_nothing(opened, verb):
    arena, faulty, meter = opened
    faulty.arm(lambda number, called: called == verb)
    assert not split_by_way_of(arena, EXTENT, KEEP, STAGING)
    assert arena.extents == (EXTENT, OTHER)
    assert [at(arena, granule) for granule in range(4)] == [1, 2, 3, 4]
    assert_conserved(arena, meter)


@pytest.mark.parametrize("verb", ["create", "map"])
def test_memory_that_is_away_for_a_moment_is_waited_for(opened, verb):
    arena, faulty, meter = opened
    faulty.arm(lambda number, called: called == verb and number < 20)
    assert split_by_way_of(arena, EXTENT, KEEP, STAGING)
    assert [at(arena, granule) for granule in (1, 3)] == [2, 4]
    assert_conserved(arena, meter)


def test_memory_that_stays_away_is_one_clear_error(opened):
    arena, faulty, meter = opened
    faulty.arm(lambda number, called: called == "create")
    with pytest.raises(DeviceError, match="4MiB of KV cache in use had to be moved"):
        split_by_way_of(arena, EXTENT, KEEP, STAGING)
    assert arena.extents == (OTHER,)
    assert_conserved(arena, meter)


def test_what_can_be_neither_released_nor_mapped_again_is_said(opened):
    arena, faulty, meter = opened
    faulty.arm(lambda number, called: called in ("release", "map"))
    with pytest.raises(DeviceError):
        split_by_way_of(arena, EXTENT, KEEP, STAGING)
    assert arena.quarantined_bytes == EXTENT.size_bytes
    assert_conserved(arena, meter)
