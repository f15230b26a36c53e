"""Cutting runs into extents."""

import pytest

from kvtide.memory.extents import Span, ahead_bytes, cap_for, cut, merge
from kvtide.units import GIB, MIB


def spans(*pairs: tuple[int, int]) -> list[Span]:
    return [Span(offset * MIB, size * MIB) for offset, size in pairs]


@pytest.mark.parametrize(
    ("total", "cap"),
    [
        (0, 2),
        (100 * MIB, 2),
        (255 * MIB, 2),
        (256 * MIB, 4),
        (12 * GIB, 128),
        (40 * GIB, 512),
        (141 * GIB, 512),
    ],
)
def test_cap_is_a_64th_of_the_device(total, cap):
    assert cap_for(total) == cap * MIB


def test_merge_joins_what_touches():
    assert merge(spans((6, 2), (0, 2), (2, 2), (10, 4), (12, 2))) == spans((0, 4), (6, 2), (10, 4))


def test_cut_takes_the_largest_aligned_extents():
    assert cut(spans((2, 30)), 512 * MIB) == spans((2, 2), (4, 4), (8, 8), (16, 16))
    assert cut(spans((0, 30)), 8 * MIB) == spans((0, 8), (8, 8), (16, 8), (24, 4), (28, 2))
    assert cut(spans((0, 2), (2, 2)), 4 * MIB) == spans((0, 4))
    assert cut([], 2 * MIB) == []


@pytest.mark.parametrize("cap", [0, 1, 3 * MIB, 1024 * MIB, MIB])
def test_a_cap_that_is_no_extent_is_refused(cap):
    with pytest.raises(ValueError, match="no extent"):
        cut([], cap)


@pytest.mark.parametrize("span", [Span(1, 2 * MIB), Span(0, 3 * MIB), Span(MIB, MIB)])
def test_what_is_not_made_of_granules_is_refused(span):
    with pytest.raises(ValueError, match="granules"):
        cut([span], 2 * MIB)


@pytest.mark.parametrize(
    ("mapped", "cap", "ahead"),
    [
        (0, 512 * MIB, 32 * MIB),
        (0, 4 * MIB, 4 * MIB),
        (2 * GIB, 512 * MIB, 2 * GIB // 20),
        (20 * GIB, 512 * MIB, 512 * MIB),
    ],
    ids=["at first", "a small device", "a twentieth", "no more than steps soon take"],
)
def test_what_is_grown_ahead_is_bounded_on_both_sides(mapped, cap, ahead):
    assert ahead_bytes(mapped, cap) == ahead


def test_of_a_hundred_blocks_taken_one_by_one_fewer_than_one_waits_for_a_growth():
    """So that the 99th percentile of an allocation is no growth, up to 20 GB of 2 MiB blocks."""
    block, mapped, growths = 2 * MIB, 2 * MIB, 0
    for taken in range(2, 10_002):
        if mapped < taken * block:
            mapped += max(block, ahead_bytes(mapped, 512 * MIB) // block * block)
            growths += 1
        assert mapped - taken * block <= max(32 * MIB, taken * block / 20)
    assert growths < 100
