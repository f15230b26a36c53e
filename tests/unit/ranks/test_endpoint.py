"""What a rank maps of its own, beside its scheduler's orders: it stays counted and charged."""

import pytest

from kvtide.errors import DeviceError
from paper_device import GRANULE
from ranks_world import World, layers


@pytest.fixture
def engine(tmp_path):
    world = World(tmp_path)
    yield world.engine([(0, layers(64, GRANULE, 1))], direct=True)
    world.close()


def fail_first(rank, verb, calls):
    """Have the device refuse the first calls of a verb."""
    real, left = getattr(rank.device, verb), list(range(calls))

    def call(*arguments):
        if left:
            left.pop()
            raise DeviceError(f"{verb} failed")
        return real(*arguments)

    setattr(rank.device, verb, call)


def test_what_a_warm_up_named_goes_with_its_charge(engine):
    (rank,) = engine.ranks
    rank.endpoint.back_named(range(5, 15))
    assert rank.account.charge_bytes == 11 * GRANULE
    rank.endpoint.forget_named()
    assert rank.account.charge_bytes == rank.memory.arena.mapped_bytes == GRANULE
    engine.check_quiet()


@pytest.mark.parametrize("verb", ["unmap", "release"])
def test_what_is_stuck_after_a_warm_up_stays_charged_and_the_rest_grows(engine, verb):
    (rank,) = engine.ranks
    rank.endpoint.back_named(range(5, 15))
    fail_first(rank, verb, 4)
    rank.endpoint.forget_named()
    stuck_bytes = rank.memory.arena.quarantined_bytes
    assert stuck_bytes == 4 * GRANULE
    assert rank.account.charge_bytes == GRANULE + stuck_bytes
    engine.check()
    # The scheduler learns with its first answer what its device holds of the start, and where.
    engine.step(8)
    engine.quieten()
    assert engine.memory.changes.quarantined_bytes == {0: stuck_bytes}
    engine.clock.now += 1
    taken = engine.step(8)
    assert taken is not None
    if verb == "unmap":
        assert not set(taken) & set(range(5, 9))
    engine.check()
    # It is told once.
    engine.give(list(engine.blocks.live))
    engine.step(idle=True)
    engine.quieten()
    assert engine.memory.changes.quarantined_bytes == {0: stuck_bytes}
    assert rank.account.charge_bytes == GRANULE + stuck_bytes
    engine.check()
