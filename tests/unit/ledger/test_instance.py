import os
import time

import pytest

from kvtide.errors import LedgerError, NameTakenError, StaleRevisionError, UsageError
from kvtide.ledger import Granted, Ledger, PoolFigures, State
from kvtide.units import MIB
from ledger_world import TOTAL, Member, enroll, spec


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    yield ledger
    ledger.close()


@pytest.fixture
def twin(tmp_path, ledger):
    twin = Ledger.open(tmp_path / "kv", spec())
    yield twin
    twin.close()


def test_default_names_get_a_number_where_taken(ledger, twin):
    names = [which.register("vllm-m", explicit=False).name for which in (ledger, twin, ledger)]
    assert names == ["vllm-m", "vllm-m-2", "vllm-m-3"]


def test_an_explicit_name_that_is_live_is_refused_with_its_holder(ledger, twin):
    ledger.register("a", explicit=True)
    with pytest.raises(NameTakenError, match=rf"'a'.*process {os.getpid()}.*KVTIDE_NAME"):
        twin.register("a", explicit=True)


def test_a_name_is_free_once_its_owner_closed_or_died(ledger, twin):
    instance, account = enroll(ledger, "a")
    account.close()
    instance.close()
    assert twin.register("a", explicit=True).name == "a"
    twin.close()
    assert ledger.register("a", explicit=True).name == "a"


def test_a_name_whose_pools_are_still_ending_is_waited_for(ledger, twin, monkeypatch):
    instance, account = enroll(ledger, "a")
    instance.close()
    assert [i.state for i in twin.snapshot().instances] == [State.DEAD]
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            account.close()

    monkeypatch.setattr("kvtide.ledger.registration.time.sleep", nap)
    assert twin.register("a", explicit=True).name == "a"
    assert len(naps) == 3


def test_waiting_for_an_ending_name_ends_itself(ledger, twin, monkeypatch):
    instance, _ = enroll(ledger, "a")
    instance.close()
    late = [0.0]
    monkeypatch.setattr("kvtide.ledger.registration.time.monotonic", lambda: late[0])

    def nap(seconds):
        assert seconds <= 0.25
        late[0] += seconds

    monkeypatch.setattr("kvtide.ledger.registration.time.sleep", nap)
    with pytest.raises(NameTakenError, match=rf"ending, slowly, in process {os.getpid()}"):
        twin.register("a", explicit=True)
    assert 5 <= late[0] < 5.5
    assert twin.register("a", explicit=False).name == "a-2"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a\nb", "-a", "x" * 129, "é" * 65])
def test_a_name_that_cannot_be_one_is_refused(ledger, name):
    with pytest.raises(UsageError):
        ledger.register(name, explicit=True)


@pytest.mark.parametrize("name", ["é" * 64, "模型:7b@v1", "x" * 128])
def test_names_of_any_script_are_kept_whole(ledger, name):
    assert ledger.register(name, explicit=True).name == name
    assert ledger.snapshot().instances[0].name == name


def test_another_process_attaches_by_key(ledger, twin):
    instance = ledger.register("a", explicit=True, limit_bytes=7)
    attached = twin.instance(instance.key)
    assert (attached.name, attached.limit_bytes, attached.limit_revision) == ("a", 7, 1)
    attached.close()
    assert instance.live
    instance.close()
    with pytest.raises(LedgerError, match="'a' was retired"):
        attached.set_state(State.RUNNING)
    with pytest.raises(LedgerError, match="gone"):
        twin.instance(instance.key)


def test_states_are_shown(ledger):
    instance = ledger.register("a", explicit=True)
    for state in (State.RUNNING, State.SLEEPING, State.WAITING, State.STARTING):
        instance.set_state(state)
        assert ledger.snapshot().instances[0].state is state


def test_limits_carry_revisions_and_an_older_one_never_overwrites_a_newer(ledger, twin):
    instance = ledger.register("a", explicit=True)
    assert twin.set_limit("a", 10, revision=1) == 2
    assert twin.set_limit("a", 20) == 3
    with pytest.raises(StaleRevisionError, match=r"limit 20B.*at revision 3.*revision 2"):
        twin.set_limit("a", 30, revision=2)
    with pytest.raises(StaleRevisionError):
        twin.set_limit("a", 30, revision=4)
    assert (instance.limit_bytes, instance.limit_revision) == (20, 3)
    assert twin.set_limit("a", None, revision=3) == 4
    assert instance.limit_bytes is None


def test_a_limit_of_nobody_names_who_there_is(ledger):
    ledger.register("a", explicit=True)
    with pytest.raises(LedgerError, match=r"no instance 'b'.*there is a"):
        ledger.set_limit("b", 1)


@pytest.mark.parametrize("limit", [-1, 1 << 62, 10**30])
def test_an_impossible_limit_is_refused(ledger, limit):
    instance = ledger.register("a", explicit=True)
    with pytest.raises(UsageError):
        ledger.set_limit("a", limit)
    with pytest.raises(UsageError):
        ledger.register("b", explicit=True, limit_bytes=limit)
    assert instance.limit_revision == 1


def test_a_limit_below_what_is_pinned_names_the_smallest(ledger):
    _, account = enroll(ledger, "a")
    account.publish(PoolFigures(1, 1, 0, 1, 0, 0, pinned_bytes=2 * MIB))
    with pytest.raises(UsageError, match="smallest that works is 2MiB"):
        ledger.set_limit("a", 2 * MIB - 1)
    assert ledger.set_limit("a", 2 * MIB) == 2


def test_a_limit_below_the_charge_refuses_growth_and_demands_what_is_idle(ledger):
    instance, account = enroll(ledger, "a")
    account.grant(20 * MIB)
    account.publish(PoolFigures(10, 5, 5, 1, idle_bytes=6 * MIB))
    assert ledger.demand(instance) == 0
    ledger.set_limit("a", 10 * MIB)
    assert account.grant(1).reason == "limit"
    assert ledger.demand(instance) == 6 * MIB
    account.publish(PoolFigures(10, 5, 5, 1, idle_bytes=2 * MIB, releasing_bytes=4 * MIB))
    assert ledger.demand(instance) == 2 * MIB
    ledger.set_limit("a", 18 * MIB)
    assert ledger.demand(instance) == 0


def test_a_wish_wakes_who_holds_idle_memory_and_nobody_else(ledger, twin):
    idle, a = enroll(ledger, "idle")
    busy, b = enroll(ledger, "busy")
    wishes, c = enroll(twin, "wishes")
    a.grant(TOTAL // 2)
    b.grant(TOTAL // 2)
    a.publish(PoolFigures(1, 0, 1, 1, idle_bytes=64 * MIB))
    wakers = [instance.waker() for instance in (idle, busy, wishes)]
    assert c.grant(MIB).reason == "budget"
    wishes.wish(8 * MIB)
    assert [waker.wait(0) for waker in wakers] == [True, False, False]
    assert (ledger.demand(idle), ledger.demand(busy)) == (8 * MIB, 0)
    a.refund(8 * MIB)
    assert [waker.wait(0) for waker in wakers] == [False, False, True]
    assert c.grant(8 * MIB) == Granted(8 * MIB)
    wishes.wish(0)
    a.refund(MIB)
    assert [waker.wait(0) for waker in wakers] == [False, False, False]
    assert ledger.demand(idle) == 0
    for waker in wakers:
        waker.close()


def test_what_raises_the_room_wakes_who_waits(ledger, twin):
    free = [0]
    waits, a = enroll(ledger, "waits", lambda: free[0])
    _, b = enroll(twin, "b", lambda: free[0])
    waker = waits.waker()
    waits.wish(MIB)
    assert not waker.wait(0)
    b.sample()
    assert not waker.wait(0)
    free[0] = MIB
    b.sample()
    assert waker.wait(0)  # the budget rose
    b.sample()
    assert not waker.wait(0)
    ledger.set_limit("waits", MIB)
    assert waker.wait(0)  # its limit changed
    twin.close()
    assert ledger.retire_dead() == 2
    assert waker.wait(0)  # somebody died
    assert a.grant(MIB) == Granted(MIB)
    waker.close()


def test_wake_ups_are_kept_and_many_are_one(ledger):
    instance = ledger.register("a", explicit=True)
    waker = instance.waker()
    for _ in range(10_000):
        ledger.bell.ring([(instance.slot, instance.generation)])
    assert waker.wait(None)
    assert not waker.wait(0)
    began = time.monotonic()
    assert not waker.wait(0.02)
    assert time.monotonic() - began >= 0.02
    waker.close()


def test_who_waits_longest_is_woken_first(ledger, monkeypatch):
    rung = []
    monkeypatch.setattr(ledger.bell, "ring", lambda who: rung.extend(slot for slot, _ in who))
    instances = [ledger.register(f"i{n}", explicit=True) for n in range(4)]
    _, account = enroll(ledger, "a")
    account.grant(TOTAL)
    for n in (2, 0, 3, 2):
        instances[n].wish(n + 1)
    rung.clear()
    account.refund(1)
    assert rung == [2, 0, 3]


@pytest.mark.parametrize("size", [-1, 1 << 62, 10**30])
def test_an_impossible_wish_is_refused(ledger, size):
    with pytest.raises(ValueError, match="wish"):
        ledger.register("a", explicit=True).wish(size)


def test_a_directory_of_any_length_has_wakers(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100) / "kv"
    deep.parent.mkdir(parents=True)
    ledger = Ledger.open(deep, spec(uuid="GPU-" + "0" * 60))
    waker = ledger.register("a", explicit=True).waker()
    ledger.bell.ring([(0, ledger.file.words[512])])
    assert waker.wait(0)
    waker.close()
    waker.close()
    ledger.close()


def test_sockets_of_the_dead_are_removed_by_who_finds_them(ledger, tmp_path):
    def sockets():
        return sorted(path.name for path in (tmp_path / "kv").glob("*.wake"))

    body = "i, a = enroll(ledger, 'b'); i.wish(1); w = i.waker()"
    with Member(tmp_path / "kv", body) as member:
        (left,) = sockets()
        slot, generation = int(left.split(".")[1]), int(left.split(".")[2], 16)
        member.kill()
        assert sockets() == [left]
        ledger.bell.ring([(slot, generation)])  # nobody is bound to it
        assert sockets() == []
    with Member(tmp_path / "kv", body) as member:
        member.kill()
    assert len(sockets()) == 1
    while ledger.snapshot().instances:
        ledger.retire_dead()
    assert sockets() == []
    (tmp_path / "kv" / f"host.5.{77:x}.wake").touch()
    (tmp_path / "kv" / "other.5.77.wake").touch()
    ledger.register("c", explicit=True)
    assert sockets() == ["other.5.77.wake"]
