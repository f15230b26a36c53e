"""What is said to whoever got no memory: who holds it, who waits before, and what would help."""

import pytest

from kvtide.ledger import Ledger, PoolFigures, holdings
from kvtide.ledger.explaining import explain
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    yield ledger
    ledger.close()


def advice(ledger, asked_bytes, name="asks"):
    snapshot = ledger.snapshot()
    return explain(snapshot, name, asked_bytes).rpartition("). ")[2]


def test_what_is_free_and_nobody_waits_for_is_free_now(ledger):
    enroll(ledger, "asks")
    enroll(ledger, "lives")
    assert advice(ledger, TOTAL) == "It is free now"


def test_who_waits_with_higher_priority_or_within_its_min_is_named(ledger):
    asks, mine = enroll(ledger, "asks", min_bytes=2 * MIB)
    high, _ = enroll(ledger, "high", priority=3)
    entitled, _ = enroll(ledger, "entitled", min_bytes=40 * MIB, priority=-1)
    low, _ = enroll(ledger, "low", priority=-1)
    mine.grant(2 * MIB)
    asks.wish(8 * MIB)
    high.wish(TOTAL)
    entitled.wish(60 * MIB)
    low.wish(8 * MIB)
    assert mine.grant(8 * MIB).reason == "budget"
    assert advice(ledger, 8 * MIB) == (
        "It is free, and others wait before it: high for 256MiB (priority 3), entitled for 40MiB "
        "(within its min of 40MiB)"
    )


def test_who_asks_within_its_min_waits_for_nobody_beyond_a_min(ledger):
    _, mine = enroll(ledger, "asks", min_bytes=16 * MIB)
    high, _ = enroll(ledger, "high", priority=3)
    high.wish(64 * MIB)
    assert advice(ledger, 16 * MIB) == "It is free now"
    mine.grant(2 * MIB)
    assert "high for 64MiB" in advice(ledger, 16 * MIB)


def test_among_equals_who_has_waited_longer_comes_first(ledger, monkeypatch):
    monkeypatch.setattr(holdings, "RIPE_NS", -1)
    equal, _ = enroll(ledger, "equal", limit_bytes=TOTAL)
    asks, mine = enroll(ledger, "asks")
    equal.wish(2 * TOTAL)
    asks.wish(8 * MIB)
    assert mine.grant(8 * MIB).reason == "budget"
    assert advice(ledger, 8 * MIB) == (
        "It is free, and others wait too, of whom the one that has waited longest comes first: "
        "equal for 256MiB"
    )


def test_what_would_free_it_is_followed_by_who_waits_before(ledger):
    _, a = enroll(ledger, "a")
    high, _ = enroll(ledger, "high", priority=1)
    enroll(ledger, "asks")
    a.grant(TOTAL)
    a.publish(PoolFigures(1, 1, 1, 1, idle_bytes=TOTAL))
    high.wish(10 * MIB)
    assert advice(ledger, 8 * MIB) == (
        "This would free it: kvtide trim a; others wait before it: high for 10MiB (priority 1)"
    )
