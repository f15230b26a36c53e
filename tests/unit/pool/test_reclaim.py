"""What goes first: free extents, then the oldest cache, then parts of extents in use."""

import numpy as np
import pytest

from kvtide.pool import Geometry, Pool, Splits, Standing, Strip
from kvtide.pool.plans import Run
from kvtide.units import MIB

SIZE = 2 * MIB


def pool_of(blocks, cap=4, *, strips=None):
    geometry = Geometry.of(blocks, strips or [Strip(0, SIZE, SIZE)], SIZE)
    pool = Pool([geometry], cap * SIZE)
    growths = pool.plan_growth(blocks)
    pool.begin_growth(growths)
    pool.confirm_growth(growths)
    return pool


def standing(pool, live=(), cached=()):
    free = pool.usable_mask()
    free[list(live) + list(cached)] = False
    age = np.full(pool.blocks_total, -1, np.int64)
    age[list(cached)] = np.arange(len(cached))
    return Standing(pool.usable_mask(), free, age)


def firsts(reclaim):
    return [run.first for run in reclaim.shrinks[0].extents]


def test_free_extents_go_from_the_top():
    pool = pool_of(20)
    reclaim = pool.plan_shrink(standing(pool, live=[0]), [6], cached=False)
    assert firsts(reclaim) == [16, 12]
    assert reclaim.shrinks[0].granules == 8
    assert np.flatnonzero(reclaim.withdrawn).tolist() == list(range(12, 20))


def test_at_most_gives_rather_less():
    pool = pool_of(20)
    reclaim = pool.plan_shrink(standing(pool, live=[0]), [6], cached=False, at_most=True)
    assert firsts(reclaim) == [16]


def test_the_cache_stays_unless_it_may_go():
    pool = pool_of(20)
    now = standing(pool, live=[0], cached=[9, 13, 17, 5])
    reclaim = pool.plan_shrink(now, [None], cached=False)
    assert firsts(reclaim) == []
    reclaim = pool.plan_shrink(now, [8], cached=True)
    # The extent whose newest cached block is oldest.
    assert firsts(reclaim) == [8, 12]


def test_an_extent_that_a_live_block_touches_does_not_go():
    pool = pool_of(20)
    reclaim = pool.plan_shrink(standing(pool, live=[0, 6, 11]), [None], cached=True)
    assert sorted(firsts(reclaim)) == [12, 16]


def test_a_split_keeps_the_granules_of_live_blocks():
    pool = pool_of(16, cap=8)
    reclaim = pool.plan_shrink(
        standing(pool, live=[0, 3]), [None], cached=True, splits=Splits([0], staged=False)
    )
    (split,) = reclaim.shrinks[0].splits
    assert split.extent == Run(0, 8)
    assert split.keep == (Run(0, 1), Run(3, 1))
    assert reclaim.shrinks[0].granules == 14
    assert reclaim.lacking == [0]


def test_what_is_held_twice_has_to_come_from_somewhere():
    pool = pool_of(16, cap=8)
    now = standing(pool, live=[0, 3, 9, 10, 11])
    plan = pool.plan_shrink
    reclaim = plan(now, [None], cached=True, splits=Splits([0], staged=False))
    assert reclaim.shrinks[0].granules == 0
    assert reclaim.lacking == [2]
    # The first carries the second.
    reclaim = plan(now, [None], cached=True, splits=Splits([2], staged=False))
    assert [s.extent.first for s in reclaim.shrinks[0].splits] == [0, 8]
    assert reclaim.lacking == [0]
    reclaim = plan(now, [None], cached=True, splits=Splits([0], staged=True))
    first, second = reclaim.shrinks[0].splits
    assert len(first.staging) == 2
    assert set(first.staging) <= {8, 12, 13, 14, 15}
    assert second.staging == ()


def test_nothing_is_carried_where_a_cached_block_lies():
    pool = pool_of(16, cap=8)
    now = standing(pool, live=[0, 9], cached=[8, 10, 11, 12, 13, 14])
    reclaim = pool.plan_shrink(now, [1], cached=True, splits=Splits([0], staged=True))
    (split,) = reclaim.shrinks[0].splits
    assert split.staging == (15,)


def test_enough_is_enough():
    pool = pool_of(64, cap=8)
    live = [0, *range(1, 64, 8)]
    reclaim = pool.plan_shrink(
        standing(pool, live=live), [8], cached=True, splits=Splits([4], staged=False)
    )
    assert 8 <= reclaim.shrinks[0].granules <= 14


@pytest.mark.parametrize("length", [MIB, 3 * MIB, 5 * MIB])
def test_a_block_over_two_extents_goes_with_either(length):
    pool = pool_of(12, cap=2, strips=[Strip(0, length, length)])
    reclaim = pool.plan_shrink(standing(pool, live=[0]), [1], cached=False)
    (run,) = reclaim.shrinks[0].extents[:1]
    size = run.granules * SIZE
    start = run.first * SIZE
    touched = [b for b in range(12) if b * length < start + size and (b + 1) * length > start]
    assert set(touched) <= set(np.flatnonzero(reclaim.withdrawn).tolist())
