"""Arenas over the host device: growing, shrinking and splitting."""

import ctypes
import os
import signal
import time

import pytest

from kvtide.device.host import HostDevice
from kvtide.memory import Arena, Span
from kvtide.units import MIB
from memory_invariants import CountingMeter, assert_conserved

SIZE = 64 * MIB


def span(offset: int, size: int) -> Span:
    return Span(offset * MIB, size * MIB)


@pytest.fixture
def meter():
    return CountingMeter()


@pytest.fixture
def arena(meter):
    device = HostDevice(32 * MIB, uuid=f"arena-{os.getpid()}-{time.monotonic_ns()}")
    arena = Arena(device, SIZE, meter)
    yield arena
    assert_conserved(arena, meter)
    arena.close()
    assert meter.held_bytes == 0
    assert_conserved(arena, meter)
    device.close()


def write(arena: Arena, at: Span, value: int) -> None:
    ctypes.memset(arena.address + at.offset_bytes, value, at.size_bytes)


def read(arena: Arena, at: Span) -> bytes:
    return ctypes.string_at(arena.address + at.offset_bytes, at.size_bytes)


def faults(arena: Arena, offset: int) -> bool:
    """Whether an access would die: write(2) from such an address is EFAULT, without a signal."""
    read_end, write_end = os.pipe()
    libc = ctypes.CDLL(None)
    libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    written = libc.write(write_end, arena.address + offset, 1)
    os.close(read_end)
    os.close(write_end)
    return written < 0


def test_growing_maps_zeros_at_exactly_these_spans(arena, meter):
    assert arena.grow([span(8, 4), span(0, 2)])
    assert arena.extents == (span(0, 2), span(8, 4))
    assert arena.mapped_bytes == meter.created_bytes == 6 * MIB
    assert read(arena, span(8, 4)) == bytes(4 * MIB)
    write(arena, span(8, 4), 3)
    assert [faults(arena, at * MIB) for at in (0, 2, 6, 8, 11, 12)] == [0, 1, 1, 0, 0, 1]


def test_growing_by_nothing_is_no_change(arena):
    assert arena.grow([])
    assert arena.extents == ()


def test_growing_beyond_the_device_changes_nothing(arena, meter):
    assert arena.grow([span(0, 16)])
    assert not arena.grow([span(16, 8), span(24, 8), span(32, 2)])
    assert arena.extents == (span(0, 16),)
    assert meter.created_bytes - meter.released_bytes == 16 * MIB
    assert arena.grow([span(16, 8), span(24, 8)])


def test_shrinking_takes_whole_extents(arena, meter):
    assert arena.grow([span(0, 2), span(2, 4), span(6, 2), span(10, 2)])
    arena.shrink([span(2, 6), span(10, 2)])
    assert arena.extents == (span(0, 2),)
    assert meter.released_bytes == 8 * MIB
    assert faults(arena, 2 * MIB)
    assert arena.grow([span(2, 2)])


@pytest.mark.parametrize(
    "wrong", [span(0, 4), span(2, 2), span(2, 8), span(8, 2), span(0, 0), span(3, 3)]
)
def test_what_is_not_whole_extents_cannot_be_shrunk(arena, wrong):
    assert arena.grow([span(0, 2), span(2, 4)])
    with pytest.raises(ValueError, match="whole extents"):
        arena.shrink([wrong])
    assert arena.extents == (span(0, 2), span(2, 4))


@pytest.mark.parametrize(
    "wrong",
    [
        [span(4, 2)],
        [span(2, 4)],
        [span(0, 8)],
        [span(62, 4)],
        [span(-2, 2)],
        [span(0, 3)],
        [span(1, 2)],
        [span(0, 0)],
        [span(0, 2), span(0, 2)],
        [span(0, 4), span(2, 2)],
    ],
)
def test_growth_where_there_is_something_or_no_room_is_refused(arena, wrong):
    assert arena.grow([span(4, 4)])
    with pytest.raises(ValueError, match=r"mapped already|granules|outside"):
        arena.grow(wrong)
    assert arena.extents == (span(4, 4),)


def test_splitting_keeps_parts_in_place_with_their_contents(arena, meter):
    assert arena.grow([span(0, 16), span(16, 2)])
    for offset in range(0, 18, 2):
        write(arena, span(offset, 2), offset + 1)
    assert arena.split(span(0, 16), [span(12, 4), span(2, 2)])
    assert arena.extents == (span(2, 2), span(12, 4), span(16, 2))
    for offset in (2, 12, 14, 16):
        assert read(arena, span(offset, 2)) == bytes([offset + 1]) * (2 * MIB)
    assert [faults(arena, at * MIB) for at in (0, 4, 10)] == [1, 1, 1]
    assert (meter.created_bytes, meter.released_bytes) == (24 * MIB, 16 * MIB)
    arena.shrink([span(2, 2)])


def test_splitting_needs_memory_for_the_parts(arena):
    assert arena.grow([span(0, 32)])
    write(arena, span(0, 32), 9)
    assert not arena.split(span(0, 32), [span(4, 2)])
    assert arena.extents == (span(0, 32),)
    assert read(arena, span(4, 2)) == b"\x09" * (2 * MIB)


def test_keeping_all_in_one_part_is_no_change(arena, meter):
    assert arena.grow([span(0, 4)])
    assert arena.split(span(0, 4), [span(0, 4)])
    assert meter.created_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("whole", "keep"),
    [
        (span(0, 4), [span(0, 2)]),
        (span(2, 2), [span(2, 2)]),
        (span(0, 8), []),
        (span(0, 8), [span(6, 4)]),
        (span(0, 8), [span(0, 1)]),
        (span(0, 8), [span(0, 4), span(2, 2)]),
    ],
)
def test_what_is_no_split_of_one_extent_is_refused(arena, whole, keep):
    assert arena.grow([span(0, 8)])
    with pytest.raises(ValueError, match=r"whole extent|granules|outside|nothing is kept"):
        arena.split(whole, keep)
    assert arena.extents == (span(0, 8),)


def test_closing_gives_everything_back(meter):
    device = HostDevice(32 * MIB, uuid=f"arena-{os.getpid()}-{time.monotonic_ns()}")
    arena = Arena(device, SIZE, meter)
    assert arena.grow([span(0, 2), span(4, 4)])
    arena.close()
    arena.close()
    assert arena.extents == ()
    assert meter.released_bytes == 6 * MIB
    device.close()


def test_a_child_dies_at_the_first_access(arena):
    assert arena.grow([span(0, 2)])
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(arena.address, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
