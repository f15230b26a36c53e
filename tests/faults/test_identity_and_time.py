"""Pids that come again, clocks that jump, children that inherit: leases alone say who lives."""

import os
import signal
import subprocess
import sys
import time

import pytest
from surroundings import Child, in_child

from kvtide.device.census import used_bytes
from kvtide.device.host import HostDevice
from kvtide.errors import LedgerError, NameTakenError
from kvtide.ledger import Granted, Ledger, State
from kvtide.ledger import layout as w
from kvtide.memory import Arena, Span
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec, until

HOUR_NS = 3600 * 10**9


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def ledger(directory):
    ledger = Ledger.open(directory, spec())
    yield ledger
    ledger.close()


def put_pid(ledger: Ledger, pid: int) -> None:
    for at in (w.instance_at(0) + w.I_PID, w.pool_at(0) + w.P_PID):
        ledger.file.words[at] = pid


def test_a_dead_owner_whose_pid_lives_again_is_dead(ledger, directory):
    other = Ledger.open(directory, spec())
    enroll(other, "a")[1].grant(MIB)
    other.close()
    put_pid(ledger, os.getpid())  # the kernel gave its pid to this process, of all
    (view,) = ledger.snapshot().instances
    assert view.state is State.DEAD
    assert ledger.retire_dead() == 2
    instance, account = enroll(ledger, "a")
    assert instance.name == "a"
    assert account.grant(TOTAL) == Granted(TOTAL)


def test_a_living_owner_whose_pid_nobody_has_lives(ledger, directory):
    """As seen from another pid namespace: two containers."""
    other = Ledger.open(directory, spec())
    instance, account = enroll(other, "a")
    account.grant(MIB)
    gone = Child(lambda: None)
    gone.end()
    put_pid(ledger, gone.pid)
    assert ledger.retire_dead() == 0
    assert instance.live
    assert account.charge_bytes == MIB
    with pytest.raises(NameTakenError):
        ledger.register("a", explicit=True)
    other.close()


def test_a_clock_set_back_an_hour_changes_nothing(ledger, directory, monkeypatch):
    """Wall-clock time decides nothing: all times in a ledger are monotonic."""
    other = Ledger.open(directory, spec())
    instance, account = enroll(ledger, "a")
    wisher, _ = enroll(other, "b")
    account.grant(TOTAL)
    wisher.wish(MIB)
    before = ledger.snapshot()
    real = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real[0]() - 3600)
    monkeypatch.setattr(time, "time_ns", lambda: real[1]() - HOUR_NS)
    assert ledger.snapshot() == before
    assert account.sample()
    waker = wisher.waker()
    account.refund(2 * MIB)
    assert waker.wait(60)
    waker.close()
    assert ledger.demands(instance).idle_bytes == 0
    assert not ledger.snapshot().instances[0].silent
    other.close()


def test_times_of_an_hour_ahead_hold_nobody_up(ledger, directory):
    """As a container with a monotonic clock of its own writes them, or a machine's last boot."""
    other = Ledger.open(directory, spec())
    _, account = enroll(ledger, "a")
    wisher, thirsty = enroll(other, "b")
    words = ledger.file.words
    account.grant(TOTAL - 4 * MIB)
    wisher.wish(8 * MIB)
    ahead = time.monotonic_ns() + HOUR_NS
    words[w.H_SAMPLED_NS] = words[w.H_RETIRED_NS] = ahead
    for word in (w.I_WISH_SINCE_NS, w.I_WISH_SEEN_NS, w.I_CALLED_NS, w.I_DEADLINE_NS):
        words[w.instance_at(1) + word] = ahead
    assert account.grant(2 * MIB) == Granted(2 * MIB)
    refusal = thirsty.grant(8 * MIB)
    assert refusal.reason == "budget"
    assert refusal.sample_is_stale, "a sample of the future is none"
    account.refund(account.charge_bytes)
    assert thirsty.grant(8 * MIB) == Granted(8 * MIB)
    assert account.sample()
    assert abs(words[w.H_SAMPLED_NS] - time.monotonic_ns()) < HOUR_NS // 2
    other.close()


def held_in_a_child(directory, uuid, then) -> None:
    """In a child: an instance with memory; `then` runs while it holds it."""
    device = HostDevice(64 * MIB, uuid=uuid)
    ledger = Ledger.open(directory, spec(uuid=uuid, total_bytes=64 * MIB))
    instance, account = enroll(ledger, "owner", device.free_bytes)
    instance.waker()
    arena = Arena(device, 16 * MIB, account)
    account.grant(8 * MIB)
    arena.grow([Span(0, 8 * MIB)])
    then(ledger, instance, account, device)
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(*_: object) -> int:
    """A grandchild, forked without exec, that outlives its parent."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def exec_on(*_: object) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def exec_with_all_descriptors(*_: object) -> int:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(sleeper, close_fds=False).pid


@pytest.mark.parametrize("then", [sleep_on, exec_on, exec_with_all_descriptors])
def test_what_a_holder_forked_keeps_neither_lease_nor_lock_nor_memory(directory, then):
    uuid = f"test-fork-{os.getpid()}"
    read, write = os.pipe()

    def report(*args: object) -> None:
        os.write(write, str(then(*args)).encode())

    child = Child(lambda: held_in_a_child(directory, uuid, report))
    grandchild = int(os.read(read, 100))
    try:
        assert child.end() == -signal.SIGKILL
        os.kill(grandchild, 0)
        until(lambda: used_bytes(uuid) == 0, "the memory is gone though a child lives")
        ledger = Ledger.open(directory, spec(uuid=uuid, total_bytes=64 * MIB))
        _, account = enroll(ledger, "owner", lambda: 64 * MIB - used_bytes(uuid))
        assert [i.name for i in ledger.snapshot().instances] == ["owner"]
        assert account.grant(64 * MIB) == Granted(64 * MIB)
        assert sorted(p.name for p in directory.iterdir()) == [f"{uuid}.ledger"]
        ledger.close()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_forked_child_that_uses_what_it_inherited_is_told_so(ledger):
    instance, account = enroll(ledger, "a")
    account.grant(MIB)

    def use() -> list[str]:
        said = []
        for act in (
            lambda: account.grant(MIB),
            lambda: account.created(MIB),
            account.sample,
            ledger.snapshot,
            lambda: instance.wish(MIB),
            lambda: ledger.register("child", explicit=True),
        ):
            try:
                act()
            except LedgerError as error:
                said.append(str(error))
        account.close()
        instance.close()
        ledger.close()
        return said

    said = in_child(use)
    assert len(said) == 6
    assert all("forked" in text for text in said)
    # And what it closed was its own.
    assert account.live
    assert instance.live
    assert account.grant(MIB) == Granted(MIB)
