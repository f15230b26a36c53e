"""Engines of different priority on one device: who gives first, and what is left to whom."""

import pytest

from kvtide.observe.tallies import read_tally
from kvtide.observe.tally import tallies_of
from kvtide.units import MIB
from paper_device import GRANULE
from ranks_world import World, layers

BLOCKS = 20


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path, total_bytes=64 * GRANULE)
    yield world
    world.close()


def engines_of(world, *priorities):
    """Engines whose caches hold so many granules each, all idle."""
    engines = []
    ledger = world.ledgers["paper-0"]
    for priority in priorities:
        engine = world.engine([(0, layers(100, 2 * MIB, 1))], direct=True)
        ledger.set_terms(f"engine-{len(engines)}", lambda t, p=priority: t._replace(priority=p))
        for _ in range(3):
            taken = engine.step(BLOCKS)
            if taken is not None:
                break
        engine.give(taken, cache=True)
        engine.memory.trim()
        engine.memory.publish()
        engines.append(engine)
    return engines


def cached(engine):
    return len(engine.blocks.cached)


def give(engines):
    for engine in engines:
        engine.squeeze()
        engine.check_quiet()


def test_three_priorities_under_one_pressure(world):
    low, middle, high = engines_of(world, -1, 0, 1)
    (waiter,) = engines_of_more(world, 2)
    assert [cached(e) for e in (low, middle, high)] == [BLOCKS] * 3
    free = world.memories["paper-0"].total_bytes - world.memories["paper-0"].held_bytes
    for granules, left in (
        (free // GRANULE + 5, [15, 20, 20]),
        (free // GRANULE + 5 + 15 + 5, [0, 15, 20]),
        (free // GRANULE + 5 + 15 + 5 + 15 + 5, [0, 0, 15]),
    ):
        for seat in waiter.memory.seats.values():
            seat.instance.wish(granules * GRANULE)
        give((high, middle, low))
        now = [cached(e) for e in (low, middle, high)]
        assert now == pytest.approx(left, abs=5), granules
        assert now == sorted(now), "lower priority never keeps what higher has to give"
        world.check()


def engines_of_more(world, priority):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))], direct=True)
    name = f"engine-{len(world.engines) - 1}"
    world.ledgers["paper-0"].set_terms(name, lambda t: t._replace(priority=priority))
    return [engine]


def test_equals_are_asked_in_proportion_to_what_they_hold_idle(world):
    one, other = engines_of(world, 0, 0)
    other.take(BLOCKS // 2)
    other.memory.publish()
    (waiter,) = engines_of_more(world, 0)
    free = world.memories["paper-0"].total_bytes - world.memories["paper-0"].held_bytes
    for seat in waiter.memory.seats.values():
        seat.instance.wish(free + 12 * GRANULE)
    ledger = world.ledgers["paper-0"]
    asked = [
        ledger.demand(seat.instance) // GRANULE
        for engine in (one, other)
        for seat in engine.memory.seats.values()
    ]
    assert sum(asked) == pytest.approx(12, abs=1)
    assert asked[0] == pytest.approx(2 * asked[1], abs=2)


def test_a_trim_takes_what_is_idle_once_and_running_blocks_stay(world):
    (engine,) = engines_of(world, 0)
    running = engine.take(5)
    ledger = world.ledgers["paper-0"]
    engine.memory.publish()
    ledger.ask_to_trim("engine-0")
    assert engine.memory.owing
    engine.squeeze()
    engine.check_quiet()
    assert cached(engine) == 0
    assert sorted(engine.blocks.live) == sorted(running)
    assert not engine.memory.owing
    assert engine.memory.giving.demanded_of_running() == [0]
    ledger.ask_to_trim("engine-0", running=True)
    assert engine.memory.giving.demanded_of_running()[0] > 0
    engine.memory.giving.nothing_more()
    assert not engine.memory.owing


@pytest.mark.parametrize("direct", [True, False])
def test_what_an_engine_grows_by_after_a_trim_it_keeps(world, direct):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))], direct=direct)
    ledger = world.ledgers["paper-0"]
    taken = None
    while taken is None:
        taken = engine.step(10)
        engine.run_ranks()
    engine.give(taken, cache=True)
    engine.quieten()
    ledger.ask_to_trim("engine-0", 2 * GRANULE)
    # All its requests wait, and it is looked after before each step what it owes.
    for _ in range(8):
        running = engine.step(24, press=True)
        engine.run_ranks()
        if running is not None:
            break
    assert running is not None, "what came for the requests went for the trim, again and again"
    engine.step(press=True)
    engine.quieten()
    assert not ledger.is_trimming(next(iter(engine.memory.seats.values())).instance.key)
    engine.check_quiet()


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_that_lie_apart_are_regrouped_below_a_limit(world, direct):
    # Four parts of every block, four blocks a granule of each part.
    engine = world.engine([(0, layers(64, 2 * MIB, 4))], direct=direct)
    ledger = world.ledgers["paper-0"]
    taken = None
    while taken is None:
        taken = engine.step(40)
        engine.quieten()
    kept = taken[4::8]
    engine.give([b for b in taken if b not in kept], cache=True)
    engine.quieten()
    ledger.set_limit("engine-0", 16 * GRANULE)
    engine.squeeze()
    engine.give(kept, cache=True)
    engine.quieten()
    engine.squeeze()
    (charge,) = (rank.account.charge_bytes for rank in engine.ranks)
    assert charge <= 16 * GRANULE
    engine.memory.regroup()
    engine.quieten()
    engine.check_quiet()
    got = engine.step(15)
    engine.quieten()
    if got is None:
        got = engine.step(15)
    assert got is not None
    assert sorted(got) == list(range(1, 16)), "side by side, below the limit"
    assert engine.ranks[0].account.charge_bytes <= 16 * GRANULE
    world.check()


def causes(world, kind, slot=0):
    path = world.ledgers["paper-0"].path
    (file,) = (f for o, f in tallies_of(path).items() if o.role == "engine" and o.slot == slot)
    return {cause for of, cause in read_tally(file).counts if of == kind}


@pytest.mark.parametrize(
    ("terms", "cause"),
    [
        ({}, "others"),
        ({"priority": 1}, "priority"),
        ({"min_bytes": 40 * GRANULE}, "min"),
        ({"headroom_bytes": 50 * GRANULE}, "headroom"),
    ],
)
def test_what_is_given_back_says_whose_it_becomes(world, terms, cause):
    (holder,) = engines_of(world, 0)
    (waiter,) = engines_of_more(world, 0)
    world.ledgers["paper-0"].set_terms("engine-1", lambda t: t._replace(**terms))
    free = world.memories["paper-0"].total_bytes - world.memories["paper-0"].held_bytes
    if cause != "headroom":
        for seat in waiter.memory.seats.values():
            wanted = free + 8 * GRANULE
            if cause == "min":
                wanted = min(wanted, 40 * GRANULE - waiter.ranks[0].account.charge_bytes)
            seat.instance.wish(wanted)
    if cause == "min":
        world.memories["paper-0"].foreign_bytes = free - 30 * GRANULE
        holder.ranks[0].account.sample()
    give((holder,))
    assert causes(world, "shrink") == causes(world, "evict") == {cause}


def test_memory_for_one_that_starts_says_so(world):
    (holder,) = engines_of(world, 0)
    ledger = world.ledgers["paper-0"]
    starting = ledger.register("starts", explicit=True)
    starting.reserve(50 * GRANULE)
    give((holder,))
    assert causes(world, "shrink") == {"reservation"}


def test_a_preemption_says_for_what_it_was(world):
    (holder,) = engines_of(world, 0)
    holder.take(BLOCKS)
    holder.memory.publish()
    (waiter,) = engines_of_more(world, 5)
    free = world.memories["paper-0"].total_bytes - world.memories["paper-0"].held_bytes
    for seat in waiter.memory.seats.values():
        seat.instance.wish(free + 8 * GRANULE)
    giving = holder.memory.giving
    assert giving.demanded_of_running()[0] > 0
    giving.preempts(2, 8)
    path = world.ledgers["paper-0"].path
    (file,) = (f for o, f in tallies_of(path).items() if o.role == "engine" and o.slot == 0)
    event = read_tally(file).events[-1]
    assert (event.kind, event.cause, event.size_bytes, event.detail) == (
        *("preempt", "priority", 8 * 2 * MIB, 2),
    )
