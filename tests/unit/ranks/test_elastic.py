"""Elastic memory over one rank and several: growing, giving back, refusals and their ends."""

import itertools
import random
import time

import pytest

from kvtide.errors import RankLostError
from kvtide.ledger import layout
from kvtide.ranks.seat import Wish
from kvtide.units import MIB
from paper_device import GRANULE
from pool_invariants import granules_under
from ranks_world import World, layers


@pytest.fixture
def make_world(tmp_path):
    worlds = []

    def make(**arguments):
        worlds.append(World(tmp_path / f"ledgers-{len(worlds)}", **arguments))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def filled(engine, blocks):
    """An engine that holds so many blocks."""
    for _ in range(3):
        taken = engine.step(blocks)
        engine.quieten()
        if taken is not None:
            return taken
    raise AssertionError("they cannot be had")


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_come_when_they_are_needed_and_go_when_they_are_not(make_world, direct):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))], direct=direct)
    assert engine.mapped_bytes() == [GRANULE]
    taken = filled(engine, 20)
    assert sorted(taken) == list(range(1, 21))
    engine.give(taken)
    engine.step(idle=True)
    engine.quieten()
    engine.check_quiet()
    assert engine.mapped_bytes() == [GRANULE]


def test_a_block_is_not_free_before_every_rank_has_mapped_it(make_world):
    world = make_world(devices=2)
    geometry = layers(100, 2 * MIB, 1)
    engine = world.engine([(0, geometry), (1, geometry)])
    assert engine.step(10) is None
    assert engine.memory.growing
    first, second = engine.ranks
    first.run(engine.stamps)
    engine.links[0].send()
    engine.links[0].deliver()
    assert engine.step(10) is None
    assert engine.blocks.free.count == 0
    second.run(engine.stamps)
    engine.links[1].send()
    engine.links[1].deliver()
    assert engine.step(10) is not None
    engine.quieten()
    engine.check_quiet()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("call", range(4))
def test_a_growth_that_one_rank_cannot_make_is_undone_by_the_others(make_world, failing, call):
    world = make_world(devices=2)
    geometry = layers(100, 2 * MIB, 1)
    engine = world.engine([(0, geometry), (1, geometry)])
    engine.ranks[failing].faults.arm(lambda number, verb: number == call)
    engine.step(24)
    engine.quieten()
    engine.check_quiet()
    assert engine.blocks.free.count == 0
    assert engine.mapped_bytes() == [GRANULE, GRANULE]
    assert engine.memory.changes.refused == 1


def test_a_device_that_does_not_honour_a_grant_is_not_asked_again_at_once(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    world.memories["paper-0"].foreign_bytes = 60 * GRANULE
    creates = engine.ranks[0].faults
    creates.arm(lambda number, verb: False)
    for _ in range(20):
        engine.step(20)
        engine.quieten()
    assert creates.calls.count("create") <= 4
    assert engine.memory.wishing
    # The sample that the refusal took: the ledger knows as much as the device now.
    engine.clock.now += 10
    engine.step(20)
    engine.quieten()
    assert engine.memory.changes.refused == 1
    engine.check_quiet()


def test_memory_that_somebody_else_let_go_is_found_by_a_later_sample(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    memory = world.memories["paper-0"]
    memory.foreign_bytes = 60 * GRANULE
    engine.step(20)
    engine.quieten()
    memory.foreign_bytes = 0
    engine.clock.now += 10
    engine.ranks[0].account.sample()
    engine.step(20)
    engine.quieten()
    assert engine.step(20) is not None


def test_pauses_double_while_a_device_refuses_what_its_ledger_grants(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    engine.ranks[0].faults.arm(lambda number, verb: verb == "map")
    asked = []
    for _ in range(400):
        before = engine.memory.changes.refused
        engine.step(20)
        engine.quieten()
        if engine.memory.changes.refused > before:
            asked.append(engine.clock.now)
        engine.clock.now += 0.05
    pauses = [round(b - a, 2) for a, b in itertools.pairwise(asked)]
    assert pauses[:4] == pytest.approx([0.25, 0.5, 1.0, 2.0], abs=0.11)
    assert max(pauses) <= 4.1


def test_what_cannot_be_undone_stays_charged_and_is_never_opened_again(make_world):
    world = make_world(devices=2)
    geometry = layers(100, 2 * MIB, 1)
    engine = world.engine([(0, geometry), (1, geometry)])
    engine.ranks[0].faults.arm(lambda number, verb: verb == "unmap")
    engine.ranks[1].faults.arm(lambda number, verb: verb == "create")
    engine.step(8)
    engine.quieten()
    engine.ranks[0].faults.disarm()
    engine.ranks[1].faults.disarm()
    engine.check_quiet()
    stuck = engine.ranks[0].memory.arena.quarantined_bytes
    assert stuck > 0
    assert engine.memory.changes.quarantined_bytes == {0: stuck, 1: 0}
    (instance,) = world.ledgers["paper-0"].snapshot().instances
    assert instance.pools[0].figures.quarantined_bytes == stuck
    engine.clock.now += 10
    taken = filled(engine, 8)
    # The pool serves on from the rest.
    blocked = {s.addresses[0] for s in engine.ranks[0].memory.arena.quarantined}
    base = engine.ranks[0].memory.arena.address
    assert not {(at - base) // GRANULE for at in blocked} & granules_under(geometry, taken)
    engine.check_quiet()


def test_a_late_and_a_second_answer_change_nothing(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    engine.step(8)
    engine.ranks[0].run(engine.stamps)
    link = engine.links[0]
    link.send()
    late = list(link.on_the_way)
    link.deliver()
    taken = engine.step(8)
    assert taken is not None
    engine.quieten()
    engine.give(taken)
    engine.step(idle=True)
    link.on_the_way += late
    engine.quieten()
    engine.check_quiet()
    assert engine.blocks.free.count == 0


def test_an_order_that_comes_twice_is_carried_out_once(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    engine.step(8)
    (rank,) = engine.ranks
    rank.steps.append(rank.steps[0])
    engine.quieten()
    engine.check_quiet()


def test_a_rank_that_does_not_answer_ends_the_engine_with_one_message(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    engine.links[0].lossy = True
    engine.step(8)
    engine.run_ranks()
    engine.clock.now += 299
    engine.memory.settle()
    engine.clock.now += 2
    with pytest.raises(RankLostError, match=r"rank 0 .* has not answered for 300 s"):
        engine.memory.settle()


def test_a_rank_that_ended_is_noticed_at_once(make_world):
    world = make_world()
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    engine.step(8)
    engine.links[0].ended = True
    with pytest.raises(RankLostError, match=r"rank 0 .* has ended"):
        engine.memory.settle()


def test_a_grant_that_one_device_refuses_wakes_nobody(make_world):
    """Two engines that cross would else wake each other for ever."""
    world = make_world(devices=2, total_bytes=16 * GRANULE)
    geometry = layers(40, 2 * MIB, 1)
    a = world.engine([(0, geometry), (1, geometry)])
    b = world.engine([(0, geometry)])
    filled(b, 8)
    waker = b.memory.seats["paper-0"].instance.waker()
    world.wish(b, 8 * GRANULE)
    engine_device_1 = a.ranks[1].account
    assert engine_device_1.grant(14 * GRANULE).granted_bytes
    a.step(4)
    assert a.memory.wishing
    assert not waker.wait(0)
    engine_device_1.refund(14 * GRANULE)
    waker.close()


def test_refusals_in_a_row_are_one_wish_of_the_largest_need(make_world):
    world = make_world(total_bytes=8 * GRANULE)
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    instance = engine.memory.seats["paper-0"].instance
    for wanted in (20, 30, 25):
        engine.step(wanted)
        engine.quieten()
    assert instance.wish_bytes == 30 * GRANULE
    engine.memory.end_wish()
    assert instance.wish_bytes == 0


def test_a_busy_engine_gives_back_what_was_free_for_seconds(make_world):
    world = make_world(total_bytes=256 * GRANULE)
    engine = world.engine([(0, layers(200, 2 * MIB, 1))])
    taken = filled(engine, 150)
    engine.give(taken[10:])
    looks = 0
    for _ in range(100):
        engine.step()
        engine.quieten()
        engine.clock.now += 0.1
        looks += engine.memory.give_surplus()
    engine.quieten()
    engine.check_quiet()
    assert engine.mapped_bytes()[0] <= (11 + 2 * 16) * GRANULE
    assert engine.mapped_bytes()[0] >= (11 + 8) * GRANULE
    assert looks <= 4


def test_a_busy_engine_keeps_what_it_uses_now_and_then(make_world):
    world = make_world(total_bytes=256 * GRANULE)
    engine = world.engine([(0, layers(200, 2 * MIB, 1))])
    for _ in range(20):
        taken = filled(engine, 150)
        assert not engine.memory.give_surplus()
        engine.give(taken)
        for _ in range(10):
            engine.step()
            engine.quieten()
            engine.clock.now += 0.1
            assert not engine.memory.give_surplus()


# Pressure -----------------------------------------------------------------------------------------


def needed_granules(engine, rank):
    return granules_under(rank.geometry, [0, *engine.blocks.live])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("blocks", "block_bytes", "count", "cap"),
    [
        (200, 2 * MIB, 1, 64),
        (200, 2 * MIB, 1, 2),
        (64, 5 * MIB, 1, 16),
        (120, 3 * MIB, 3, 32),
        (3000, 64 << 10, 2, 64),
    ],
)
def test_after_pressure_only_the_granules_of_live_blocks_are_mapped(
    make_world, blocks, block_bytes, count, cap, full, seed
):
    """Also where the budget is full, no extent can go whole, and nothing can be held twice."""
    dice = random.Random(seed)
    geometry = layers(blocks, block_bytes, count)
    total = geometry.granules_total + 2
    world = make_world(total_bytes=(total if full else 2 * total) * GRANULE)
    engine = world.engine([(0, geometry)], cap_bytes=cap * GRANULE)
    neighbour = world.engine([(0, layers(20, 2 * MIB, 1))])
    taken = filled(engine, blocks - 1)
    if full:
        left = world.ledgers["paper-0"].snapshot().free_bytes
        neighbour.ranks[0].account.grant(left)
    live = dice.sample(taken, (blocks - 1) // 10)
    rest = [b for b in taken if b not in live]
    engine.give(rest[::2])
    engine.give(rest[1::2], cache=True)
    engine.step()
    engine.quieten()
    world.wish(neighbour, total * 4 * GRANULE)
    engine.squeeze()
    engine.check_quiet()
    (rank,) = engine.ranks
    assert rank.memory.arena.mapped_bytes == len(needed_granules(engine, rank)) * GRANULE
    # And grows over them again.
    world.wish(neighbour, 0)
    if full:
        neighbour.ranks[0].account.refund(left)
    engine.clock.now += 10
    filled(engine, blocks - 1 - len(live))
    engine.check_quiet()


def test_a_split_that_cannot_be_made_leaves_the_extent_whole_and_its_blocks_in_use(make_world):
    geometry = layers(64, 2 * MIB, 1)
    world = make_world(total_bytes=256 * GRANULE)
    engine = world.engine([(0, geometry)], cap_bytes=32 * GRANULE)
    neighbour = world.engine([(0, geometry)])
    taken = filled(engine, 63)
    engine.give([b for b in taken if b % 8])
    engine.quieten()
    world.wish(neighbour, 1000 * GRANULE)
    engine.ranks[0].faults.arm(lambda number, verb: verb == "create")
    usable = engine.pool.usable_count
    assert engine.memory.yield_to_others()
    engine.step()
    engine.quieten()
    engine.check_quiet()
    # The free extents beside it went, and it is as it was.
    assert engine.pool.usable_count == usable - 7
    # It is not tried at every step.
    calls = engine.ranks[0].faults.calls
    before = calls.count("create")
    for _ in range(20):
        engine.step(press=True)
        engine.quieten()
    assert calls.count("create") <= before + 1
    engine.ranks[0].faults.disarm()
    engine.clock.now += 10
    engine.squeeze()
    engine.check_quiet()
    assert engine.mapped_bytes() == [GRANULE * len(needed_granules(engine, engine.ranks[0]))]


def test_a_split_that_only_some_ranks_could_make_stays_as_it_is(make_world):
    geometry = layers(64, 2 * MIB, 1)
    world = make_world(devices=2, total_bytes=256 * GRANULE)
    engine = world.engine([(0, geometry), (1, geometry)], cap_bytes=32 * GRANULE)
    neighbour = world.engine([(0, geometry), (1, geometry)])
    taken = filled(engine, 63)
    engine.give([b for b in taken if b % 8])
    engine.quieten()
    world.wish(neighbour, 1000 * GRANULE)
    engine.ranks[1].faults.arm(lambda number, verb: verb == "create")
    assert engine.memory.yield_to_others()
    engine.step()
    engine.quieten()
    engine.ranks[1].faults.disarm()
    engine.clock.now += 10
    engine.squeeze()
    engine.check_quiet()
    assert engine.memory.changes.quarantined_bytes[0] == 0
    assert engine.memory.changes.quarantined_bytes[1] > 0
    filled(engine, 7)
    engine.check_quiet()


def test_cached_blocks_go_oldest_extent_first(make_world):
    world = make_world(total_bytes=256 * GRANULE)
    engine = world.engine([(0, layers(65, 2 * MIB, 1))], cap_bytes=8 * GRANULE)
    neighbour = world.engine([(0, layers(65, 2 * MIB, 1))])
    taken = filled(engine, 64)
    engine.give(taken[32:], cache=True)
    engine.give(taken[:32], cache=True)
    engine.step()
    engine.quieten()
    free = world.ledgers["paper-0"].snapshot().free_bytes
    world.wish(neighbour, free + 16 * GRANULE)
    engine.squeeze()
    assert set(engine.blocks.cached) >= set(taken[:32])
    assert len(engine.blocks.cached) <= 48


def test_a_block_of_two_stages_is_free_when_both_back_it(make_world):
    """Pipeline parallel: each stage its own layers, of other sizes, on its own device."""
    first, second = layers(90, 4 * MIB, 2), layers(90, 3 * MIB, 1)
    world = make_world(devices=2, total_bytes=400 * GRANULE)
    engine = world.engine([(0, first), (1, second)], cap_bytes=16 * GRANULE)
    neighbour = world.engine([(0, first), (1, first)])
    taken = filled(engine, 80)
    engine.give(random.Random(1).sample(taken, 70))
    engine.step()
    engine.quieten()
    world.wish(neighbour, 4000 * GRANULE)
    engine.squeeze()
    engine.check_quiet()
    for rank in engine.ranks:
        assert rank.memory.arena.mapped_bytes == GRANULE * len(needed_granules(engine, rank))
    world.wish(neighbour, 0)
    engine.clock.now += 10
    filled(engine, 79)
    engine.check_quiet()


def test_a_wish_ahead_names_what_is_needed_and_what_would_be_grown_ahead(make_world):
    world = make_world()
    engine = world.engine([(0, layers(20, 2 * MIB, 1))])
    (seat,) = engine.memory.seats.values()
    engine.memory.wish_ahead(3, 3)
    (told,) = seat.ledger.snapshot().instances
    assert engine.memory.wishing
    assert told.wish_bytes == 16 * MIB  # an extent of the largest size
    engine.memory.end_wish()
    (told,) = seat.ledger.snapshot().instances
    assert told.wish_bytes == 0
    # Nothing is wished for where no block is left that could ever be backed.
    engine.step(19)
    engine.quieten()
    assert engine.memory.pool.usable_count == 20
    engine.memory.wish_ahead(3, 3)
    assert not engine.memory.wishing


def old_sample(ledger):
    """The budget's sample is of some time ago."""
    ledger.file.words[layout.H_SAMPLED_NS] -= 2_000_000_000


def wished_for(engine, seconds=0):
    """Since when its wish is there, after it was made so much older."""
    (seat,) = engine.memory.seats.values()
    words, at = seat.ledger.file.words, layout.instance_at(seat.instance.slot)
    words[at + layout.I_WISH_SINCE_NS] -= seconds * 1_000_000_000
    return words[at + layout.I_WISH_SINCE_NS]


def test_growth_ahead_looks_for_new_memory_before_a_neighbour_is_asked(make_world):
    """An outside process has let go of the device since the last look."""
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other = (world.engine([(0, geometry)], direct=True) for _ in range(2))
    ledger, memory = world.ledgers["paper-0"], world.memories["paper-0"]
    assert other.memory.grow_for(20, 20)
    other.give(other.take(20), cache=True)
    memory.foreign_bytes = memory.free_bytes
    ours.ranks[0].account.sample()
    memory.foreign_bytes = 0
    old_sample(ledger)
    assert ours.memory.grow(8)
    assert ledger.demands(other.memory.seats["paper-0"].instance).idle_bytes == 0


def test_growth_ahead_looks_in_another_process_too(make_world):
    world = make_world()
    engine = world.engine([(0, layers(64, GRANULE, 1))])
    memory = world.memories["paper-0"]
    memory.foreign_bytes = memory.free_bytes
    engine.ranks[0].account.sample()
    memory.foreign_bytes = 0
    old_sample(world.ledgers["paper-0"])
    assert not engine.memory.grow(8)
    engine.step()
    engine.quieten()
    assert engine.memory.grow(8)


def test_what_has_come_is_not_wished_for_any_more(make_world):
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other = (world.engine([(0, geometry)], direct=True) for _ in range(2))
    instance = ours.memory.seats["paper-0"].instance
    assert other.memory.grow_for(40, 40)
    assert not ours.memory.grow_for(30, 30)
    wished_bytes = instance.wish_bytes
    ours.memory.hurry()
    assert ours.memory.grow_for(10, 40)
    came_bytes = ours.mapped_bytes()[0] - GRANULE
    assert instance.wish_bytes == wished_bytes - came_bytes


def test_a_wish_of_which_all_has_come_is_over(make_world):
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other = (world.engine([(0, geometry)], direct=True) for _ in range(2))
    assert other.memory.grow_for(40, 40)
    taken = other.take(40)
    assert not ours.memory.grow_for(30, 30)
    other.give(taken)
    other.memory.trim()
    ours.memory.hurry()
    assert ours.memory.grow_for(30, 30)
    assert not ours.memory.wishing
    assert ours.memory.seats["paper-0"].instance.wish_bytes == 0


def test_who_lacks_nothing_yet_holds_nobody_up(make_world):
    """However long it wishes for what coming steps would take."""
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other = (world.engine([(0, geometry)], direct=True) for _ in range(2))
    assert ours.memory.grow_for(20, 20)
    assert other.memory.grow_for(30, 30)
    assert not ours.memory.grow(24)
    ours.memory.wish_ahead(24, 0)
    wished_for(ours, 5)
    assert other.memory.ranks.grant([GRANULE]) is None


def test_who_waits_long_is_left_what_it_cannot_go_on_without(make_world):
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other = (world.engine([(0, geometry)], direct=True) for _ in range(2))
    assert ours.memory.grow_for(20, 20)
    assert other.memory.grow_for(30, 30)
    ours.memory.wish_ahead(24, 8)
    wished_for(ours, 5)
    room = world.ledgers["paper-0"].snapshot().free_bytes // GRANULE
    assert other.memory.ranks.grant([(room - 8) * GRANULE]) is None
    assert other.memory.ranks.grant([GRANULE]) is not None


def test_a_wish_that_is_renewed_is_as_large_as_what_is_lacking_now(make_world):
    engine = make_world().engine([(0, layers(64, GRANULE, 1))])
    (seat,) = engine.memory.seats.values()
    wish = Wish(engine.memory.seats)
    wish.make({"paper-0": 30 * GRANULE})
    since_ns = wished_for(engine)
    wish.renew({"paper-0": 20 * GRANULE})
    assert seat.instance.wish_bytes == 20 * GRANULE
    assert wished_for(engine) == since_ns


@pytest.mark.parametrize("direct", [True, False])
def test_a_growth_that_a_device_refuses_keeps_the_place_of_its_wish(make_world, direct):
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other = (
        world.engine([(0, geometry)], direct=direct),
        world.engine([(0, geometry)], direct=True),
    )
    assert other.memory.grow_for(50, 50)
    taken = other.take(50)
    assert not ours.memory.grow_for(30, 30)
    instance = ours.memory.seats["paper-0"].instance
    since_ns = wished_for(ours)
    other.give(taken)
    other.memory.trim()
    ours.ranks[0].faults.arm(lambda number, verb: verb == "create")
    ours.memory.hurry()
    ours.memory.grow_for(30, 30)
    assert instance.wish_bytes
    ours.step()
    ours.quieten()
    assert instance.wish_bytes
    assert wished_for(ours) == since_ns


def test_who_can_go_on_has_no_place_before_those_who_cannot(make_world):
    world = make_world()
    geometry = layers(64, GRANULE, 1)
    ours, other, third = (world.engine([(0, geometry)], direct=True) for _ in range(3))
    for engine in (ours, third):
        assert engine.memory.grow_for(25, 25)
    ours.memory.wish_ahead(20, 0)
    room = world.ledgers["paper-0"].snapshot().free_bytes // GRANULE
    assert not other.memory.grow_for(room + 8, room + 8)
    wished_for(ours, 9)
    wished_for(other, 5)
    assert ours.memory.ranks.grant([GRANULE]) is not None
    # And it has not waited yet once it cannot.
    ours.memory.wish_ahead(20, 5)
    assert time.monotonic_ns() - wished_for(ours) < 5_000_000_000
