"""Headroom is memory of the device left unclaimed: what no budget lends serves for it first."""

import pytest

from kvtide.ledger import DeviceSpec, Granted, Ledger, PoolFigures, Refusal
from kvtide.units import GIB, MIB


@pytest.fixture
def open_ledger(tmp_path):
    tmp_path.chmod(0o700)
    opened = []

    def open_(*, cap_bytes):
        spec = DeviceSpec("GPU-x", "cuda", "a GPU", 8 * GIB, 0, cap_bytes, 2 * MIB)
        opened.append(Ledger.open(tmp_path, spec))
        return opened[-1]

    yield open_
    for ledger in opened:
        ledger.close()


def enroll(ledger, *, headroom_bytes, free_bytes):
    instance = ledger.register("a", explicit=True, headroom_bytes=headroom_bytes)
    return ledger.enroll(
        instance,
        pool_name="kv",
        rank=0,
        blocks_total=1,
        block_bytes=1,
        sampler=lambda: free_bytes,
    )


def fill(ledger, account, *, idle_bytes):
    """All that may be had, some of it idle; the instance that holds it."""
    account.grant(300 * MIB)
    account.created(300 * MIB)
    account.publish(PoolFigures(1, 1, 1, 1, idle_bytes=idle_bytes))
    account.sample()
    return ledger.instance(ledger.snapshot().instances[0].key)


def test_memory_above_the_cap_serves_for_headroom(open_ledger):
    ledger = open_ledger(cap_bytes=300 * MIB)
    account = enroll(ledger, headroom_bytes=GIB, free_bytes=8 * GIB)
    assert account.grant(300 * MIB) == Granted(300 * MIB)
    assert ledger.snapshot().free_bytes == 0


def test_what_the_cap_does_not_leave_comes_off_the_budget(open_ledger):
    ledger = open_ledger(cap_bytes=300 * MIB)
    account = enroll(ledger, headroom_bytes=GIB, free_bytes=GIB + 200 * MIB)
    refused = account.grant(202 * MIB)
    assert isinstance(refused, Refusal)
    assert refused.available_bytes == 200 * MIB
    assert ledger.snapshot().free_bytes == 200 * MIB


def test_without_a_cap_all_headroom_comes_off_the_budget(open_ledger):
    ledger = open_ledger(cap_bytes=None)
    enroll(ledger, headroom_bytes=GIB, free_bytes=8 * GIB)
    assert ledger.snapshot().free_bytes == 7 * GIB


def test_nothing_is_demanded_for_headroom_that_lies_beyond_the_cap(open_ledger):
    """Or an engine at its ceiling would give its idle memory back as often as it gets it."""
    ledger = open_ledger(cap_bytes=300 * MIB)
    account = enroll(ledger, headroom_bytes=GIB, free_bytes=8 * GIB)
    instance = fill(ledger, account, idle_bytes=200 * MIB)
    assert not ledger.is_owing(instance)
    ledger.set_limit("a", 8 * GIB)  # with terms of its own, all demands are looked at
    assert ledger.demands(instance) == (0, 0)
    assert ledger.reason(instance) is None


def test_what_headroom_lacks_beyond_the_cap_is_demanded(open_ledger):
    ledger = open_ledger(cap_bytes=300 * MIB)
    account = enroll(ledger, headroom_bytes=0, free_bytes=724 * MIB)
    instance = fill(ledger, account, idle_bytes=200 * MIB)
    ledger.set_terms("a", lambda terms: terms._replace(headroom_bytes=800 * MIB))
    assert ledger.is_owing(instance)
    assert ledger.demands(instance) == (76 * MIB, 0)
    assert ledger.reason(instance) == "headroom"


def test_what_an_instance_takes_of_its_headroom_is_not_kept_free_once_more(open_ledger):
    """What torch reserves for activations is missing from what is free already."""
    ledger = open_ledger(cap_bytes=None)
    free, taken = [GIB], [0]
    instance = ledger.register("a", explicit=True, headroom_bytes=GIB)
    account = ledger.enroll(
        instance, pool_name="kv", rank=0, blocks_total=1, block_bytes=1, sampler=lambda: free[0]
    )
    free[0] = 3 * GIB
    account.sample()
    account.grant(2 * GIB)
    account.created(2 * GIB)
    account.publish(PoolFigures(1, 1, 1, 1, idle_bytes=2 * GIB))
    account.take_headroom(lambda: taken[0])
    free[0], taken[0] = GIB - 600 * MIB, 600 * MIB
    account.sample()
    assert ledger.demands(instance) == (0, 0)
    snapshot = ledger.snapshot()
    assert (snapshot.withheld_bytes, snapshot.free_bytes) == (424 * MIB, 0)
    assert snapshot.instances[0].headroom_taken_bytes == 600 * MIB
    free[0], taken[0] = GIB, 0  # torch gave it back
    account.sample()
    assert ledger.snapshot().withheld_bytes == GIB
    assert ledger.demands(instance) == (0, 0)


def test_who_comes_after_has_taken_nothing_yet(open_ledger):
    ledger = open_ledger(cap_bytes=None)
    first = ledger.register("a", explicit=True, headroom_bytes=GIB)
    account = ledger.enroll(
        first, pool_name="kv", rank=0, blocks_total=1, block_bytes=1, sampler=lambda: 8 * GIB
    )
    account.take_headroom(lambda: GIB)
    account.sample()
    assert ledger.snapshot().withheld_bytes == 0
    account.close()
    first.close()
    enroll(ledger, headroom_bytes=GIB, free_bytes=8 * GIB)
    assert ledger.snapshot().withheld_bytes == GIB
