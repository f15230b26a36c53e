"""A pool against a plain picture of it: every plan begun, confirmed or aborted in any order."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.pool import Geometry, Pool, Run, Shrink, Splits, Standing, Strip
from kvtide.units import MIB
from pool_invariants import assert_circulation, assert_pool, granules_under
from ranks_world import Blocks, layers

SIZE = 2 * MIB
SHAPES = [
    lambda n: layers(n, 2 * MIB, 1),
    lambda n: layers(n, 3 * MIB, 3),
    lambda n: layers(n, 128 << 10, 2),
    lambda n: Geometry.of(n, [Strip(MIB, 7 * MIB, 5 * MIB)], SIZE),
]


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 60),
        shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2),
        cap=st.sampled_from([1, 4, 16]),
    )
    def open(self, blocks, shapes, cap):
        geometries = list(dict.fromkeys(make(blocks) for make in shapes))
        self.pool = Pool(geometries, cap * SIZE)
        self.blocks = Blocks(blocks)
        self.growing, self.shrinking = [], []
        growths = self.pool.plan_growth(1)
        self.pool.begin_growth(growths)
        (first, *others) = self.pool.confirm_growth(growths)
        assert first[0] == 0
        self.circulate([(1, first[1]), *others])

    def circulate(self, spans):
        for low, high in spans:
            self.blocks.free.give_span(self.blocks.blocks, low, high)

    @rule(wanted=st.integers(1, 40))
    def grow(self, wanted):
        growths = self.pool.plan_growth(wanted)
        if growths is not None:
            self.pool.begin_growth(growths)
            self.growing.append(growths)

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), done=st.booleans())
    def end_growth(self, data, done):
        growths = self.growing.pop(data.draw(st.integers(0, len(self.growing) - 1)))
        if done:
            self.circulate(self.pool.confirm_growth(growths))
        else:
            self.pool.abort_growth(growths)

    @rule(wanted=st.integers(1, 12))
    def take(self, wanted):
        self.blocks.take(wanted)

    @precondition(lambda self: self.blocks.live)
    @rule(data=st.data(), cache=st.booleans())
    def give(self, data, cache):
        some = data.draw(st.lists(st.sampled_from(self.blocks.live), unique=True))
        self.blocks.give(some, cache=cache)

    @rule(
        wanted=st.none() | st.integers(0, 20),
        cached=st.booleans(),
        how=st.sampled_from([None, (0, False), (3, False), (0, True)]),
    )
    def shrink(self, wanted, cached, how):
        age = np.full(self.pool.blocks_total, -1, np.int64)
        age[self.blocks.cached] = np.arange(len(self.blocks.cached))
        free = self.blocks.free.mask(self.pool.blocks_total)
        count = len(self.pool.shapes)
        reclaim = self.pool.plan_shrink(
            Standing(self.pool.usable_mask(), free, age),
            [wanted] * count,
            cached=cached,
            splits=None if how is None else Splits([how[0]] * count, how[1]),
        )
        assert not set(np.flatnonzero(reclaim.withdrawn)) & {0, *self.blocks.live}
        if not cached:
            assert not set(np.flatnonzero(reclaim.withdrawn)) & set(self.blocks.cached)
        for shape, shrink in zip(self.pool.shapes, reclaim.shrinks, strict=True):
            self.check_plan(shape, shrink, 0 if how is None else how[0])
        self.blocks.free.withdraw(reclaim.withdrawn)
        self.blocks.drop_cached(reclaim.withdrawn)
        self.pool.begin_shrink(reclaim.shrinks, reclaim.withdrawn)
        self.shrinking.append(reclaim.shrinks)

    def check_plan(self, shape, shrink, transient):
        kept = granules_under(shape.geometry, [0, *self.blocks.live])
        gone = {g for run in shrink.leaving() for g in range(run.first, run.first + run.granules)}
        assert not gone & kept
        assert shrink.granules == len(gone)
        room = transient + sum(run.granules for run in shrink.extents)
        going = {g for r in shrink.extents for g in range(r.first, r.first + r.granules)}
        for split in shrink.splits:
            assert split.kept_granules <= room or len(split.staging) == split.kept_granules
            room += split.extent.granules - split.kept_granules
            assert not set(split.staging) & (kept | going)
            going |= {g for r in split.leaving() for g in range(r.first, r.first + r.granules)}

    @precondition(lambda self: self.shrinking)
    @rule(data=st.data(), outcome=st.sampled_from(["gone", "whole", "apart"]))
    def end_shrink(self, data, outcome):
        shrinks = self.shrinking.pop(data.draw(st.integers(0, len(self.shrinking) - 1)))
        if outcome != "gone":
            for number, shrink in enumerate(shrinks):
                for split in shrink.splits:
                    if outcome == "whole":
                        self.circulate(self.pool.keep_whole(number, split))
                    else:
                        self.pool.keep_apart(number, split)
            shrinks = [Shrink(shrink.extents) for shrink in shrinks]
        self.pool.confirm_shrink(shrinks)

    @rule(data=st.data())
    def block_what_has_gone(self, data):
        number = data.draw(st.integers(0, len(self.pool.shapes) - 1))
        shape = self.pool.shapes[number]
        if data.draw(st.integers(0, 9)) == 0 and not self.growing:
            run = data.draw(st.integers(0, shape.geometry.granules_total - 1))
            self.pool.block(number, [Run(run, 1)])

    @invariant()
    def holds(self):
        if hasattr(self, "pool"):
            assert_pool(self.pool)
            assert_circulation(
                self.pool, self.blocks.free_ids(), self.blocks.cached, self.blocks.live
            )

    def teardown(self):
        """When all is over, every block that nothing bars can be had."""
        if not hasattr(self, "pool"):
            return
        for growths in self.growing:
            self.pool.abort_growth(growths)
        for shrinks in self.shrinking:
            self.pool.confirm_shrink(shrinks)
        growths = self.pool.plan_growth(self.pool.blocks_total)
        if growths is not None:
            self.pool.begin_growth(growths)
            self.pool.confirm_growth(growths)
        barred = np.zeros(self.pool.blocks_total, np.bool_)
        for shape in self.pool.shapes:
            for low, high in shape.barred_under(0, self.pool.blocks_total):
                barred[low:high] = True
        assert np.array_equal(self.pool.usable_mask(), ~barred)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
