"""`kvtide set`, `limit`, `trim`, `evict`, and the same from Python."""

import json
import os
import threading
from contextlib import contextmanager

import pytest

from kvtide import control
from kvtide.cli import main
from kvtide.errors import LedgerError, StaleRevisionError, UsageError
from kvtide.ledger import Ledger, PoolFigures, Terms
from kvtide.units import MIB
from ledger_world import TOTAL, Member, enroll, spec, until


@pytest.fixture
def directory(tmp_path, monkeypatch):
    for variable in [v for v in os.environ if v.startswith("KVTIDE")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("KVTIDE_DIR", str(tmp_path / "kv"))
    return tmp_path / "kv"


@pytest.fixture
def ledger(directory):
    ledger = Ledger.open(directory, spec())
    yield ledger
    ledger.close()


@pytest.fixture
def kvtide(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


def test_set_changes_what_is_given_and_keeps_the_rest(ledger, kvtide):
    instance, _ = enroll(ledger, "chat")
    status, out, _ = kvtide("set", "chat", "--limit", "64MiB", "--min", "8MiB")
    assert (status, out) == (
        0,
        "chat on host: limit 64MiB, min 8MiB, priority 0, headroom 0B, revision 2\n",
    )
    assert kvtide("set", "chat", "--priority", "-3", "--headroom", "4MiB")[0] == 0
    (view,) = ledger.snapshot().instances
    assert view.terms == Terms(64 * MIB, 8 * MIB, -3, 4 * MIB)
    assert view.revision == instance.limit_revision == 3
    assert kvtide("limit", "chat", "none")[1] == "chat on host: limit none, revision 4\n"


def test_a_stale_revision_is_refused_with_what_is_current(ledger, kvtide):
    enroll(ledger, "chat")
    control.set("chat", priority=5)
    with pytest.raises(StaleRevisionError, match=r"priority 5.* at revision 2"):
        control.set("chat", min=MIB, revision=1)
    status, _, err = kvtide("set", "chat", "--min", "1MiB", "--revision", "1")
    assert status == 1
    assert "priority 5" in err
    assert control.set("chat", min=MIB, revision=2)[0].revision == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("set", "chat"),
        ("set", "chat", "--priority", "1001"),
        ("set", "chat", "--min", "64MiB", "--limit", "32MiB"),
        ("set", "chat", "--headroom", "lots"),
        ("trim", "chat", "--to", "half"),
    ],
)
def test_what_cannot_be_is_a_usage_error(ledger, kvtide, arguments):
    enroll(ledger, "chat")
    status, out, err = kvtide(*arguments)
    assert (status, out) == (2, "")
    assert err
    assert ledger.snapshot().instances[0].revision == 1


def test_mins_beyond_the_budget_are_refused_with_the_table(ledger, kvtide):
    enroll(ledger, "a", min_bytes=100 * MIB)
    enroll(ledger, "b", headroom_bytes=56 * MIB)
    enroll(ledger, "c")
    assert kvtide("set", "c", "--min", "100MiB")[0] == 0
    status, _, err = kvtide("set", "b", "--min", "2MiB")
    assert status == 1
    for said in ("258MiB", "256MiB", "a: min 100MiB", "b: min 2MiB, headroom 56MiB", "c: min 100"):
        assert said in err
    with pytest.raises(LedgerError, match="a: min 100MiB"):
        ledger.register("d", explicit=True, min_bytes=MIB)


def test_a_trim_asks_once_for_what_is_idle_and_now_for_the_rest_too(ledger):
    instance, account = enroll(ledger, "chat")
    account.grant(64 * MIB)
    account.publish(PoolFigures(1, 1, 1, 1, 40 * MIB, pinned_bytes=4 * MIB))
    (trimmed,) = control.trim("chat", to=32 * MIB, wait_seconds=0)
    assert trimmed[2:5] == (64 * MIB, 64 * MIB, 32 * MIB)
    assert not trimmed.answered
    assert ledger.demands(instance) == (32 * MIB, 0)
    account.publish(PoolFigures(1, 1, 1, 1, 8 * MIB, pinned_bytes=4 * MIB))
    account.refund(32 * MIB)
    assert ledger.demands(instance) == (0, 0)
    account.grant(32 * MIB)
    assert ledger.demands(instance) == (0, 0), "once"
    (trimmed,) = control.trim("chat", now=True, wait_seconds=0)
    assert trimmed.to_bytes == 4 * MIB, "what is pinned is not asked for"
    assert ledger.demands(instance) == (8 * MIB, 52 * MIB)


@contextmanager
def answering(ledger, instance, give=lambda demand: None):
    """An engine that asks what it owes, and gives it."""
    ended = threading.Event()

    def run():
        while not ended.wait(0.01):
            give(ledger.demands(instance))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_trim_that_nobody_has_answered_says_so(ledger, kvtide):
    _, account = enroll(ledger, "chat")
    account.grant(82 * MIB)
    account.publish(PoolFigures(1, 1, 1, 1, 40 * MIB))
    assert kvtide("trim", "chat") == (
        0,
        f"chat on host: 82MiB before, 82MiB now; it has not answered yet, and gives back what it "
        f"can when it does (process {os.getpid()})\n",
        "",
    )


def test_a_trim_of_what_is_in_use_says_so(ledger, kvtide):
    instance, account = enroll(ledger, "chat")
    account.grant(82 * MIB)
    account.publish(PoolFigures(1, 1, 1, 1, 2 * MIB, pinned_bytes=2 * MIB))

    def give(demand):
        if demand.idle_bytes:
            account.publish(PoolFigures(1, 1, 1, 1, 0, pinned_bytes=2 * MIB))
            account.refund(demand.idle_bytes)

    with answering(ledger, instance, give):
        assert kvtide("trim", "chat")[1] == (
            "chat on host: 82MiB before, 80MiB now; what it holds above 2MiB is in use: --now "
            "preempts requests as well\n"
        )
        assert kvtide("trim", "chat", "--to", "80MiB")[1] == (
            "chat on host: 80MiB before, 80MiB now\n"
        )


def test_a_trim_whose_memory_is_on_its_way_is_not_called_done(ledger):
    instance, account = enroll(ledger, "chat")
    account.grant(82 * MIB)
    account.publish(PoolFigures(1, 1, 1, 1, 80 * MIB))

    def give(demand):
        if demand.idle_bytes:
            account.publish(PoolFigures(1, 1, 1, 1, 0, releasing_bytes=82 * MIB))

    with answering(ledger, instance, give):
        (trimmed,) = control.trim("chat", to=2 * MIB, wait_seconds=0.3)
        assert not ledger.is_trimming(instance.key)
        assert (trimmed.after_bytes, trimmed.done, trimmed.answered) == (82 * MIB, False, True)
        account.refund(80 * MIB)
        account.publish(PoolFigures(1, 1, 1, 1, 0))
        (trimmed,) = control.trim("chat", to=2 * MIB)
        assert (trimmed.after_bytes, trimmed.done) == (2 * MIB, True)


def test_a_trim_that_is_not_done_yet_says_so(ledger, kvtide):
    instance, account = enroll(ledger, "chat")
    account.grant(82 * MIB)
    account.publish(PoolFigures(1, 1, 1, 1, 80 * MIB))
    given = []

    def give(demand):
        if demand.idle_bytes and not given:
            given.append(2 * MIB)
            account.refund(2 * MIB)

    with answering(ledger, instance, give):
        out = kvtide("trim", "chat", "--now")[1]
    assert out == "chat on host: 82MiB before, 80MiB now; more is to come\n"


def test_a_lower_limit_now_preempts(ledger):
    instance, account = enroll(ledger, "chat")
    account.grant(64 * MIB)
    control.limit("chat", 32 * MIB)
    assert ledger.demands(instance) == (0, 0)
    control.limit("chat", 32 * MIB, now=True)
    assert ledger.demands(instance) == (0, 32 * MIB)


def test_evict_removes_the_dead_and_refuses_the_living(directory, ledger, kvtide):
    enroll(ledger, "alive")
    with Member(directory, "i, a = enroll(ledger, 'gone'); a.grant(6 * MIB)") as member:
        with pytest.raises(LedgerError, match=rf"lives in process {member.pid}"):
            control.evict("gone")
        member.kill()
    until(lambda: str(ledger.snapshot().instances[1].state) == "State.DEAD", "it is dead")
    status, out, _ = kvtide("evict", "gone")
    assert status == 0
    assert f"6MiB were charged to it (process {member.pid})" in out
    assert [i.name for i in ledger.snapshot().instances] == ["alive"]
    status, _, err = kvtide("evict", "gone")
    assert status == 1
    assert "no instance 'gone' runs; there is alive" in err


def test_a_dead_owner_whose_worker_holds_on_is_named(directory, ledger):
    instance, account = enroll(ledger, "half")
    account.grant(2 * MIB)
    instance.close()
    with pytest.raises(LedgerError, match=rf"process {os.getpid()} still holds 2MiB"):
        control.evict("half")


def test_a_snapshot_of_a_directory(ledger, directory):
    enroll(ledger, "chat", priority=2)
    (found,) = control.snapshot()
    assert found.instances[0].terms.priority == 2
    assert control.snapshot(directory.parent / "none") == []
    assert found.free_bytes == TOTAL


def test_another_device_is_left_alone(directory, ledger):
    other = Ledger.open(directory, spec(uuid="other"))
    enroll(ledger, "chat")
    enroll(other, "chat")
    with pytest.raises(UsageError, match="say which"):
        control.set("chat", priority=1, revision=1)
    assert [c.device for c in control.set("chat", priority=1, device="other")] == ["other"]
    assert json.dumps([c.device for c in control.set("chat", priority=2)]) == '["host", "other"]'
    other.close()


def test_status_tells_what_is_out_of_the_ordinary(ledger, kvtide):
    enroll(ledger, "plain")
    assert "plain:" not in kvtide("status")[1]
    instance, _ = enroll(ledger, "chat", priority=3, min_bytes=8 * MIB, headroom_bytes=4 * MIB)
    instance.wish(2 * MIB)
    instance.reserve(250 * MIB)
    (line,) = [line for line in kvtide("status")[1].splitlines() if line.startswith("chat:")]
    assert line == (
        "chat: priority 3, min 8MiB (6MiB unbacked), headroom 4MiB, 250MiB still to load, "
        "waits for 2MiB"
    )
