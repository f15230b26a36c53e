"""Which requests are preempted: by the extents that come free, for the fewest tokens."""

import numpy as np

from kvtide.pool import Geometry, Strip
from kvtide.pool.extents import Extents
from kvtide.pool.victims import Candidate, choose_victims

GRANULE = 1024


def world(blocks, block_bytes):
    geometry = Geometry.of(blocks, [Strip(0, block_bytes, block_bytes)], GRANULE)
    return [Extents(geometry, 8 * GRANULE)]


def live_of(blocks, *requests):
    live = np.zeros(blocks, np.bool_)
    for request in requests:
        live[list(request)] = True
    return live


def test_the_cheapest_that_is_enough_alone():
    # Four blocks a granule.
    a, b, c = range(8), range(8, 16), range(16, 28)
    candidates = [Candidate(a, 80), Candidate(b, 30), Candidate(c, 120)]
    shapes, live = world(32, GRANULE // 4), live_of(32, a, b, c)
    assert choose_victims(shapes, live, candidates, [2]) == [1]
    assert choose_victims(shapes, live, candidates, [3]) == [2]
    assert choose_victims(shapes, live, candidates, [0]) == []


def test_who_shares_every_extent_frees_nothing_alone():
    # a and b interleave; c has granules of its own, at a higher price.
    a, b, c = range(0, 8, 2), range(1, 8, 2), range(8, 12)
    candidates = [Candidate(a, 1), Candidate(b, 1), Candidate(c, 500)]
    shapes, live = world(16, GRANULE // 4), live_of(16, a, b, c)
    assert choose_victims(shapes, live, candidates, [1]) == [2]
    chosen = choose_victims(shapes, live, candidates, [3])
    assert sorted(chosen) == [0, 1, 2]


def test_blocks_of_others_keep_an_extent():
    a, kept = range(7), [7]
    candidates = [Candidate(a, 10)]
    shapes, live = world(8, GRANULE // 4), live_of(8, a, kept)
    # The second granule stays for block 7, which is nobody's to preempt.
    assert choose_victims(shapes, live, candidates, [1]) == [0]
    assert choose_victims(shapes, live, [], [1]) == []


def test_the_last_goes_first_among_equals():
    requests = [range(4 * n, 4 * n + 4) for n in range(4)]
    candidates = [Candidate(r, 16) for r in requests]
    shapes, live = world(16, GRANULE // 4), live_of(16, *requests)
    assert choose_victims(shapes, live, candidates, [2]) == [3, 2]


def test_every_shape_gets_its_share():
    small, large = world(16, GRANULE // 4)[0], world(16, 2 * GRANULE)[0]
    a, b = range(4), range(4, 12)
    candidates = [Candidate(a, 40), Candidate(b, 80)]
    live = live_of(16, a, b)
    assert choose_victims([small, large], live, candidates, [1, 8]) == [0]
    assert choose_victims([small, large], live, candidates, [2, 8]) == [1]
