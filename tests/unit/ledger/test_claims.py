"""Min, priority and headroom in a real ledger: who is granted, called and passed over."""

import os

import pytest

from kvtide.errors import LedgerError, UsageError
from kvtide.ledger import Granted, Ledger, PoolFigures, Refusal, holdings
from kvtide.ledger.explaining import explain
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    yield ledger
    ledger.close()


@pytest.fixture
def patient(monkeypatch):
    """Nobody's wish is ripe, unless a test says so."""
    monkeypatch.setattr(holdings, "RIPE_NS", 1 << 60)


def test_headroom_is_nobodys(ledger):
    _, a = enroll(ledger, "a", headroom_bytes=16 * MIB)
    _, b = enroll(ledger, "b")
    assert b.grant(TOTAL).available_bytes == TOTAL - 16 * MIB
    assert a.grant(TOTAL - 16 * MIB) == Granted(TOTAL - 16 * MIB)
    assert b.grant(1).reason == "budget"
    assert ledger.snapshot().free_bytes == 0


def test_what_can_be_obtained_is_what_a_grant_finds(ledger):
    """Room in the budget is no promise: headroom, the own limit and who waits come first."""
    a, mine = enroll(ledger, "a", headroom_bytes=16 * MIB)
    b, others = enroll(ledger, "b")
    assert isinstance(mine.grant(20 * MIB), Granted)
    assert isinstance(others.grant(10 * MIB), Granted)
    everything = ledger.snapshot().budget_bytes - 30 * MIB
    assert a.room_bytes == everything
    assert a.obtainable_bytes(64 * MIB) == everything - 16 * MIB
    ledger.set_limit("a", 24 * MIB)
    assert a.obtainable_bytes(64 * MIB) == 4 * MIB
    assert b.obtainable_bytes(64 * MIB) == everything - 16 * MIB
    ledger.set_limit("a", 8 * MIB)
    assert a.obtainable_bytes(64 * MIB) == 0
    assert isinstance(mine.grant(2 * MIB), Refusal)


def test_raised_headroom_takes_idle_memory_and_never_running(ledger):
    enroll(ledger, "a")
    b, account = enroll(ledger, "b")
    account.grant(TOTAL)
    account.publish(PoolFigures(1, 1, 1, 1, idle_bytes=10 * MIB))
    waker = b.waker()
    ledger.set_terms("a", lambda t: t._replace(headroom_bytes=32 * MIB))
    assert waker.wait(0)
    assert ledger.demands(b) == (10 * MIB, 0)
    waker.close()


@pytest.mark.usefixtures("patient")
def test_room_is_kept_for_who_waits_with_higher_priority_or_within_its_min(ledger):
    high, a = enroll(ledger, "high", priority=1)
    entitled, b = enroll(ledger, "entitled", min_bytes=40 * MIB)
    _, c = enroll(ledger, "other")
    c.grant(TOTAL - 50 * MIB)
    assert c.grant(10 * MIB) == Granted(10 * MIB)
    c.refund(10 * MIB)
    high.wish(60 * MIB)
    assert c.grant(1).reason == "budget"
    assert b.grant(1) == Granted(1), "within its min"
    b.refund(1)
    high.wish(0)
    entitled.wish(45 * MIB)
    assert c.grant(10 * MIB + 1).available_bytes == 10 * MIB
    assert a.grant(10 * MIB + 1).available_bytes == 10 * MIB, "higher priority is not a min"
    entitled.wish(0)
    assert c.grant(50 * MIB) == Granted(50 * MIB)


def test_equals_may_be_overtaken_until_a_wish_is_ripe(ledger, monkeypatch):
    waits, a = enroll(ledger, "waits")
    _, b = enroll(ledger, "b")
    b.grant(TOTAL - 8 * MIB)
    waits.wish(16 * MIB)
    assert b.grant(2 * MIB) == Granted(2 * MIB)
    b.refund(2 * MIB)
    monkeypatch.setattr(holdings, "RIPE_NS", -1)
    assert b.grant(2 * MIB).reason == "budget"
    assert a.grant(8 * MIB) == Granted(8 * MIB)


def test_a_wish_that_nothing_could_meet_or_nobody_repeats_holds_nobody_up(ledger, monkeypatch):
    waits, _ = enroll(ledger, "waits", priority=1)
    _, b = enroll(ledger, "b")
    b.publish(PoolFigures(1, 1, 0, 1, 0, pinned_bytes=8 * MIB))
    b.grant(8 * MIB)
    waits.wish(TOTAL)
    assert b.grant(MIB) == Granted(MIB)
    waits.wish(TOTAL, least_bytes=TOTAL - 8 * MIB)
    assert b.grant(MIB).reason == "budget"
    monkeypatch.setattr(holdings, "STALE_NS", -1)
    assert b.grant(MIB) == Granted(MIB)


def test_a_min_comes_from_running_requests_and_leaves_the_givers_min(ledger):
    a, _ = enroll(ledger, "a", min_bytes=64 * MIB)
    b, account = enroll(ledger, "b", min_bytes=200 * MIB - 8 * MIB)
    account.grant(TOTAL)
    account.publish(PoolFigures(1, 1, 1, 1, idle_bytes=20 * MIB, pinned_bytes=8 * MIB))
    a.wish(100 * MIB)
    assert ledger.demands(b) == (20 * MIB, 44 * MIB)
    ledger.set_terms("a", lambda t: t._replace(min_bytes=0))
    assert ledger.demands(b) == (20 * MIB, 0)


def test_who_was_called_and_stays_silent_is_passed_over_and_named(ledger, monkeypatch):
    waits, _ = enroll(ledger, "waits")
    one, a = enroll(ledger, "one")
    other, b = enroll(ledger, "other")
    for account in (a, b):
        account.grant(TOTAL // 2)
        account.publish(PoolFigures(1, 0, 1, 1, idle_bytes=TOTAL // 2))
    waits.wish(40 * MIB)
    silent = [i.silent for i in ledger.snapshot().instances]
    assert silent == [False, False, False]
    assert ledger.demands(other) == (20 * MIB, 0)
    monkeypatch.setattr(holdings, "SILENT_NS", -1)
    assert [i.silent for i in ledger.snapshot().instances] == [False, True, False]
    said = explain(ledger.snapshot(), "waits", 200 * MIB)
    assert f"one 128MiB (starting, 128MiB idle, does not answer, process {os.getpid()})" in said
    assert "free it: kvtide trim other; continue or end one, which does not answer" in said
    wakers = [instance.waker() for instance in (one, other)]
    waits.wish(40 * MIB)
    assert [waker.wait(0) for waker in wakers] == [False, True]
    assert ledger.demands(other) == (40 * MIB, 0)
    # It answers: it gives its part again.
    assert ledger.demands(one) == (20 * MIB, 0)
    assert not any(i.silent for i in ledger.snapshot().instances[1:2])
    for waker in wakers:
        waker.close()


def test_higher_priority_is_woken_first(ledger, monkeypatch):
    rung = []
    monkeypatch.setattr(ledger.bell, "ring", lambda who: rung.extend(slot for slot, _ in who))
    low, high, equal = (
        ledger.register(f"i{n}", explicit=True, priority=p) for n, p in enumerate((0, 5, 0))
    )
    _, account = enroll(ledger, "a")
    account.grant(TOTAL)
    for instance in (low, equal, high):
        instance.wish(1)
    rung.clear()
    account.refund(1)
    assert rung == [1, 0, 2]


def test_a_min_that_the_budget_has_lost_is_shown_as_unbacked(ledger):
    free = [TOTAL]
    _, account = enroll(ledger, "a", lambda: free[0], min_bytes=100 * MIB)
    enroll(ledger, "b", lambda: free[0], min_bytes=100 * MIB, priority=1)
    assert [i.backed_min_bytes for i in ledger.snapshot().instances] == [100 * MIB] * 2
    free[0] = 130 * MIB  # another program takes the rest
    account.sample()
    assert [i.backed_min_bytes for i in ledger.snapshot().instances] == [30 * MIB, 100 * MIB]


@pytest.mark.parametrize(
    "terms",
    [
        {"min_bytes": -1},
        {"headroom_bytes": 1 << 62},
        {"priority": 1001},
        {"min_bytes": 2, "limit_bytes": 1},
    ],
)
def test_terms_that_nobody_can_have(ledger, terms):
    with pytest.raises(UsageError):
        ledger.register("a", explicit=True, **terms)
    assert ledger.snapshot().instances == ()


def test_a_min_above_what_the_device_has_is_refused_before_any_sample(ledger):
    with pytest.raises(LedgerError, match=r"a: min 257MiB"):
        ledger.register("a", explicit=True, min_bytes=257 * MIB)


def test_claims_end_with_their_owner(ledger, tmp_path):
    twin = Ledger.open(tmp_path / "kv", spec())
    enroll(twin, "a", min_bytes=200 * MIB, headroom_bytes=20 * MIB)
    _, b = enroll(ledger, "b")
    twin.close()
    ledger.retire_dead()
    b.sample()
    assert b.grant(TOTAL) == Granted(TOTAL)
    ledger.register("c", explicit=True, min_bytes=200 * MIB)
