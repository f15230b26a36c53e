"""Free blocks: lowest first, counted exactly, whatever comes and goes."""

import random

import numpy as np

from kvtide.pool import FreeBlocks
from ranks_world import Block


def blocks(total):
    return [Block(n) for n in range(total)]


def test_the_lowest_drawers_are_taken_from_first():
    free = FreeBlocks(100, 10)
    everything = blocks(100)
    free.give(everything[50:60])
    free.give(everything[5:8])
    taken = [b.block_id for b in free.take(5)]
    assert sorted(taken[:3]) == [5, 6, 7]
    assert set(taken[3:]) <= set(range(50, 60))
    assert free.count == 8


def test_a_span_is_handed_out_from_its_lowest_on():
    free = FreeBlocks(100, 10)
    free.give_span(blocks(100), 3, 27)
    assert [b.block_id for b in free.take(7)] == [9, 8, 7, 6, 5, 4, 3]
    assert [b.block_id for b in free.take(2)] == [11, 10]
    assert free.count == 15


def test_more_than_there_is_gives_all_there_is():
    free = FreeBlocks(10)
    free.give(blocks(10)[2:5])
    assert len(free.take(9)) == 3
    assert free.take(1) == []
    assert free.count == 0


def test_against_a_plain_set():
    dice = random.Random(3)
    everything = blocks(300)
    free, there, out = FreeBlocks(300, 16), set(), set(range(300))
    for _ in range(2000):
        kind = dice.randrange(4)
        if kind == 0 and out:
            some = dice.sample(sorted(out), dice.randint(1, min(20, len(out))))
            free.give([everything[n] for n in some])
            there |= set(some)
            out -= set(some)
        elif kind == 1:
            taken = {b.block_id for b in free.take(dice.randrange(30))}
            assert taken <= there
            if there - taken:
                # None that stays lies in a lower drawer than one that was taken.
                lowest = min(n // 16 for n in there - taken)
                assert all(n // 16 <= lowest for n in taken)
            there -= taken
            out |= taken
        elif kind == 2:
            gone = np.zeros(300, np.bool_)
            low = dice.randrange(300)
            gone[low : low + dice.randrange(60)] = True
            free.withdraw(gone)
            left = {n for n in there if gone[n]}
            there -= left
            out |= left
        else:
            low = dice.randrange(300)
            high = low
            while high < min(300, low + 40) and high in out:
                high += 1
            if high > low:
                free.give_span(everything, low, high)
                there |= set(range(low, high))
                out -= set(range(low, high))
        assert free.count == len(there)
        assert set(np.flatnonzero(free.mask(300)).tolist()) == there
