"""What an engine notes of its memory: every change once, with its cause and its bytes."""

import pytest

from kvtide.ledger import State
from kvtide.observe.tallies import read_tally
from kvtide.observe.tally import tallies_of
from kvtide.units import MIB
from paper_device import GRANULE
from ranks_world import World, layers


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "ledgers")
    yield made
    made.close()


def readings(world, role):
    path = world.ledgers["paper-0"].path
    listed = sorted(tallies_of(path).items())
    return [read_tally(file) for owner, file in listed if owner.role == role]


def net_bytes(counts):
    """What grew, less what was given back."""
    return sum(
        counted.size_bytes * {"grow": 1, "shrink": -1}.get(kind, 0)
        for (kind, _), counted in counts.items()
    )


def test_growth_and_trim_are_counted_with_their_causes(world):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    while (taken := engine.step(20)) is None:
        engine.quieten()
    (reading,) = readings(world, "engine")
    assert reading.counts[("grow", "start")] == (1, GRANULE)
    assert [cause for kind, cause in reading.counts if kind == "grow"] != ["start"]
    assert net_bytes(reading.counts) == engine.mapped_bytes()[0]
    engine.quieten()
    engine.give(taken)
    engine.step(idle=True)
    engine.quieten()
    (reading,) = readings(world, "engine")
    assert ("shrink", "idle") in reading.counts
    assert net_bytes(reading.counts) == engine.mapped_bytes()[0] == GRANULE
    (rank,) = readings(world, "rank")
    creates = rank.times["create"].total
    assert creates >= len([e for e in reading.events if e.kind == "grow"])
    assert rank.times["release"].total == creates - 1


def test_a_miss_is_a_refusal_and_a_wait_that_ends(world):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    world.memories["paper-0"].foreign_bytes = 60 * GRANULE
    engine.ranks[0].account.sample()
    for _ in range(3):
        assert engine.step(20) is None
        engine.quieten()
    engine.memory.journal.count_now()
    (reading,) = readings(world, "engine")
    assert reading.counts[("refuse", "budget")].times >= 1
    assert reading.counts[("miss", "budget")].times == 3
    assert [e.kind for e in reading.events].count("miss") == 1
    assert reading.counts[("wait", "need")].times == 1
    assert ("resume", "need") not in reading.counts
    world.memories["paper-0"].foreign_bytes = 0
    engine.ranks[0].account.sample()
    engine.clock.now += 10
    while engine.step(20) is None:
        engine.quieten()
    engine.memory.end_wish()
    (reading,) = readings(world, "engine")
    assert reading.counts[("resume", "need")].times == 1
    assert reading.times["wait"].total == 1


def test_what_a_device_refuses_and_keeps_is_counted(world):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    engine.ranks[0].faults.arm(lambda number, verb: verb in ("unmap", "map"))
    engine.step(8)
    engine.quieten()
    engine.ranks[0].faults.disarm()
    (reading,) = readings(world, "engine")
    assert reading.counts[("refuse", "device")].times == 1
    assert ("grow", "need") not in reading.counts
    assert net_bytes(reading.counts) == GRANULE


def test_tallies_go_with_the_engine(world):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    assert len(tallies_of(world.ledgers["paper-0"].path)) == 2
    engine.memory.close()
    assert [owner.role for owner in tallies_of(world.ledgers["paper-0"].path)] == ["rank"]


@pytest.mark.parametrize(("change", "cause"), [("limit", "limit"), ("trim", "trim")])
def test_what_is_given_back_says_for_what(world, change, cause):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    while (taken := engine.step(20)) is None:
        engine.quieten()
    engine.quieten()
    engine.give(taken)
    ledger = world.ledgers["paper-0"]
    (instance,) = ledger.snapshot().instances
    if change == "limit":
        ledger.set_limit(instance.name, 4 * GRANULE)
    else:
        ledger.ask_to_trim(instance.name, 0, running=False)
    assert engine.memory.yield_to_others()
    (reading,) = readings(world, "engine")
    assert ("shrink", cause) in reading.counts
    assert [c for kind, c in reading.counts if kind == "shrink"] == [cause]


def test_what_the_engine_evicts_itself_is_summed_and_counted_soon(world):
    engine = world.engine([(0, layers(100, 2 * MIB, 1))])
    journal = engine.memory.journal
    journal.evicted_blocks += 3
    journal.evicted_blocks += 4
    assert ("evict", "allocation") not in readings(world, "engine")[0].counts
    engine.memory.show(State.SLEEPING)
    (reading,) = readings(world, "engine")
    assert reading.counts[("evict", "allocation")] == (7, 7 * 2 * MIB)
    journal.evicted_blocks += 1
    journal._counted_ns = 0  # long ago
    engine.memory.publish()
    (reading,) = readings(world, "engine")
    assert reading.counts[("evict", "allocation")] == (8, 8 * 2 * MIB)
