"""Blocks over granules: every answer against the definition of a strip."""

import numpy as np
import pytest

from kvtide.pool import Geometry, Strip
from kvtide.units import MIB
from pool_invariants import granules_of

SIZE = 2 * MIB
GEOMETRIES = [
    Geometry.of(20, [Strip(0, SIZE, SIZE)], SIZE),
    Geometry.of(33, [Strip(0, 3 * MIB, 3 * MIB)], SIZE),
    Geometry.of(100, [Strip(n * 100 * 65536, 65536, 65536) for n in range(4)], SIZE),
    Geometry.of(17, [Strip(0, 5 * MIB, MIB), Strip(2 * MIB, 5 * MIB, 3 * MIB)], SIZE),
    # Groups that share their bytes, and a hole that belongs to nobody.
    Geometry.of(9, [Strip(MIB, 7 * MIB, 2 * MIB), Strip(MIB, 7 * MIB, 5 * MIB)], SIZE),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_granules_under_blocks(geometry):
    for first in range(0, geometry.blocks_total, 3):
        for end in range(first + 1, geometry.blocks_total + 1, 5):
            found = set()
            for low, high in geometry.granule_runs(first, end):
                found |= set(range(low, high))
            expected = {g for b in range(first, end) for g in granules_of(geometry, b)}
            # A run is whole: a strip with gaps may name a granule that no block of it touches.
            assert found >= expected
            if all(s.length_bytes == s.stride_bytes for s in geometry.strips):
                assert found == expected


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_blocks_over_granules(geometry):
    touched = [granules_of(geometry, b) for b in range(geometry.blocks_total)]
    for first in range(geometry.granules_total):
        for count in (1, 2, 5):
            run = set(range(first, min(first + count, geometry.granules_total)))
            expected = {b for b in range(geometry.blocks_total) if touched[b] & run}
            spans = geometry.block_spans(first, len(run))
            assert {b for low, high in spans for b in range(low, high)} == expected
            which, low, high = geometry.blocks_over(
                np.array([first, 0]), np.array([first + len(run), geometry.granules_total])
            )
            ours = which == 0
            assert list(zip(low[ours], high[ours], strict=True)) == spans
            assert set(which.tolist()) <= {0, 1}


def test_the_arena_is_as_small_as_its_strips_allow():
    geometry = Geometry.of(5, [Strip(0, 3 * MIB, MIB)], SIZE)
    assert geometry.arena_bytes == 14 * MIB
    assert geometry.granules_total == 7
    assert geometry.block_bytes == MIB


def test_strips_that_are_the_same_count_once():
    geometry = Geometry.of(4, [Strip(0, SIZE, SIZE), Strip(0, SIZE, SIZE)], SIZE)
    assert geometry.block_bytes == SIZE
