"""Memory about to be loaded: kept from others, made room for, counted once, gone with its owner."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from kvtide.engines.reservation import Reservation, StartCosts, recalled, remember
from kvtide.errors import NeverFitsError
from kvtide.ledger import Granted, Ledger, PoolFigures, State
from kvtide.ranks.seat import Seat
from kvtide.units import MIB
from ledger_world import TOTAL, Member, enroll, spec, until


class Device:
    """Counts what is really taken of it, inside the ledger and beside it."""

    def __init__(self) -> None:
        self.beside = 0
        self.pools: list = []

    def free(self) -> int:
        return TOTAL - self.beside - sum(held for held in self.pools)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    yield ledger
    ledger.close()


def hold(account, size):
    assert account.grant(size) == Granted(size)
    account.created(size)


def test_what_is_reserved_is_nobodys_until_it_is_measured(ledger, device):
    _, a = enroll(ledger, "a", device.free)
    b = ledger.register("b", explicit=True)
    b.reserve(100 * MIB)
    assert a.grant(TOTAL - 100 * MIB + 1).reason == "budget"
    hold(a, 100 * MIB)
    device.pools = [100 * MIB]
    (_, view) = ledger.snapshot().instances
    assert (view.reserved_bytes, view.loading_bytes, view.charged_bytes) == (
        100 * MIB,
        100 * MIB,
        0,
    )
    room = TOTAL - 200 * MIB
    # Half is loaded, and told after it is taken: no sample on the way finds more room.
    for beside, told in ((0, 0), (50, 0), (50, 50), (100, 0), (100, 50), (100, 0)):
        device.beside = beside * MIB
        b.loaded(told * MIB)
        assert a.sample()
        left = a.grant(TOTAL).available_bytes
        assert left <= room
        assert left >= room - 50 * MIB
    assert left == room
    device.beside = 70 * MIB  # it was less in the end
    b.measured(70 * MIB, "torch")
    assert a.sample()
    assert a.grant(TOTAL).available_bytes == room + 30 * MIB
    (_, view) = ledger.snapshot().instances
    assert (view.non_kv_bytes, view.non_kv_source, view.loading_bytes) == (70 * MIB, "torch", 0)


def test_a_sample_on_the_way_never_credits_what_is_loaded_meanwhile(ledger, device):
    b = ledger.register("b", explicit=True)
    acts = []

    def free():
        found = device.free()
        for act in acts:
            act()
        acts.clear()
        return found

    _, a = enroll(ledger, "a", free)
    b.reserve(60 * MIB)

    def load():
        device.beside = 60 * MIB
        b.loaded(60 * MIB)

    acts.append(load)
    assert a.sample()
    assert a.grant(TOTAL).available_bytes <= device.free()
    acts.append(lambda: b.reserve(40 * MIB))
    assert a.sample()
    assert a.grant(TOTAL).available_bytes == device.free() - 40 * MIB


def test_idle_cache_is_called_for_what_is_about_to_be_loaded(ledger, tmp_path, device):
    a, account = enroll(ledger, "a", device.free)
    hold(account, TOTAL - 10 * MIB)
    account.publish(PoolFigures(1, 0, 1, 1, idle_bytes=100 * MIB))
    waker = a.waker()
    other = Ledger.open(tmp_path / "kv", spec())
    b = other.register("b", explicit=True)
    b.reserve(50 * MIB)
    assert waker.wait(0)
    assert ledger.demands(a) == (40 * MIB, 0)
    other.close()
    waker.close()


def test_running_requests_are_for_higher_priority_alone(ledger):
    a, account = enroll(ledger, "a")
    account.grant(TOTAL)
    b = ledger.register("b", explicit=True)
    b.reserve(50 * MIB)
    assert ledger.demands(a) == (0, 0)
    ledger.set_terms("b", lambda t: t._replace(priority=1))
    assert ledger.demands(a) == (0, 50 * MIB)


def test_a_reservation_dies_with_its_owner(ledger, tmp_path):
    _, account = enroll(ledger, "a")
    body = "i = ledger.register('b', explicit=True); i.reserve(100 * MIB)"
    with Member(tmp_path / "kv", body) as member:
        assert account.sample()
        assert account.grant(TOTAL).available_bytes == TOTAL - 100 * MIB
        member.kill()
    until(ledger.retire_dead, "the dead is retired")
    assert account.sample()
    assert account.grant(TOTAL) == Granted(TOTAL)


def test_a_start_waits_until_room_is_made_and_shows_it(ledger, tmp_path):
    a, account = enroll(ledger, "a")
    account.grant(TOTAL - MIB)
    account.publish(PoolFigures(1, 0, 1, 1, idle_bytes=TOTAL - MIB))
    other = Ledger.open(tmp_path / "kv", spec())
    b = other.register("b", explicit=True)
    reservation = Reservation(Seat(other, b), lambda: TOTAL)
    waker = a.waker()
    states = []

    def give():
        assert waker.wait(60)
        states.append(ledger.snapshot().instances[1].state)
        size = ledger.demands(a).idle_bytes
        account.refund(size)

    holder = threading.Thread(target=give)
    holder.start()
    reservation.make(50 * MIB, 10)
    holder.join()
    waker.close()
    assert account.charge_bytes <= TOTAL - 50 * MIB
    assert b.room_bytes >= 0
    assert ledger.snapshot().instances[1].state is State.STARTING
    reservation.loaded(30 * MIB)
    reservation.loaded(80 * MIB)
    assert ledger.snapshot().instances[1].loading_bytes == 0
    reservation.finish(20 * MIB, "driver")
    assert ledger.snapshot().instances[1].non_kv_bytes == 20 * MIB
    other.close()


def test_a_start_that_may_not_wait_says_who_holds_what(ledger):
    _, account = enroll(ledger, "a")
    account.grant(TOTAL)
    b = ledger.register("b", explicit=True)
    reservation = Reservation(Seat(ledger, b), lambda: TOTAL)
    with pytest.raises(NeverFitsError, match=r"a 256MiB.*kvtide limit a 206MiB --now"):
        reservation.make(50 * MIB, 0)
    with pytest.raises(NeverFitsError, match="less its margin is 256MiB"):
        reservation.make(TOTAL + 1, None)
    assert ledger.snapshot().instances[1].loading_bytes == 0


def test_what_a_start_measured_is_kept_for_the_same_key(tmp_path: Path):
    assert recalled(tmp_path, "llama tp=1") is None
    remember(tmp_path, "llama tp=1", 5 * MIB)
    remember(tmp_path, "llama tp=2", 3 * MIB)
    assert recalled(tmp_path, "llama tp=1") == 5 * MIB
    remember(tmp_path, "llama tp=1", 6 * MIB)
    assert recalled(tmp_path, "llama tp=1") == 6 * MIB
    for path in tmp_path.iterdir():
        path.write_text("nonsense")
    assert recalled(tmp_path, "llama tp=1") is None


def test_a_group_reads_what_its_members_measured_whatever_their_umask(tmp_path: Path):
    directory = tmp_path / "kv"
    directory.mkdir()
    for mode, expected in ((0o2770, 0o660), (0o700, 0o600)):
        directory.chmod(mode)
        before = os.umask(0o077 if mode == 0o2770 else 0o022)
        try:
            remember(directory, "llama tp=1", 5 * MIB)
        finally:
            os.umask(before)
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == expected


@pytest.mark.parametrize("reason", [errno.EACCES, errno.ENOSPC])
def test_a_hint_that_cannot_be_kept_or_read_stops_nothing(tmp_path, monkeypatch, caplog, reason):
    def fail(*_, **__):
        raise OSError(reason, os.strerror(reason))

    remember(tmp_path, "llama tp=1", 5 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fchmod", fail)
        remember(tmp_path, "llama tp=1", 6 * MIB)
    assert recalled(tmp_path, "llama tp=1") == 5 * MIB, "and what was kept is left"
    assert len(list(tmp_path.iterdir())) == 1, "nothing half written is left behind"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fail)
        assert recalled(tmp_path, "llama tp=1") is None
    assert [os.strerror(reason) in r.getMessage() for r in caplog.records] == [True, True]
    assert all("KVTIDE_DIR" in r.getMessage() for r in caplog.records)


def test_a_start_beside_a_directory_that_is_gone_goes_on(ledger, tmp_path, caplog):
    start = Start(ledger, tmp_path / "gone")
    start.costs.reserve(40 * MIB, 0)
    start.costs.finish(start.held, "driver")
    assert ledger.snapshot().instances[0].non_kv_bytes == start.held
    assert len(caplog.records) == 1


class Start:
    """What a starting process holds, and who keeps it in mind."""

    def __init__(self, ledger: Ledger, directory: Path, name: str = "b") -> None:
        self.ledger = ledger
        self.held = 10 * MIB  # its context, before anything is announced
        self.instance = ledger.register(name, explicit=True)
        seat = Seat(ledger, self.instance)
        self.costs = StartCosts(seat, lambda: TOTAL, lambda: self.held, directory, "llama tp=1")

    def loading(self) -> int:
        found = {i.name: i for i in self.ledger.snapshot().instances}
        return found[self.instance.name].loading_bytes


def test_the_first_start_reserves_its_weights_and_the_next_what_that_one_came_to(ledger, tmp_path):
    first = Start(ledger, tmp_path)
    first.costs.reserve(40 * MIB, 0)
    assert first.loading() == 40 * MIB
    first.held += 30 * MIB
    first.costs.loaded()
    assert first.loading() == 10 * MIB
    first.held += 25 * MIB  # graphs and workspaces, which no plan knew
    first.costs.loaded()
    assert first.loading() == 0
    first.costs.finish(first.held, "driver")
    second = Start(ledger, tmp_path, "c")
    second.costs.reserve(40 * MIB, 0)
    assert second.loading() == 55 * MIB


def test_a_start_of_which_nothing_is_known_reserves_nothing(ledger, tmp_path):
    start = Start(ledger, tmp_path)
    start.costs.reserve(0, 0)
    start.held += 30 * MIB
    start.costs.loaded()
    assert start.loading() == 0
    start.costs.finish(start.held, "torch")
    assert ledger.snapshot().instances[0].non_kv_bytes == 40 * MIB


def test_a_start_that_shrank_reserves_nothing_below_zero(ledger, tmp_path):
    remember(tmp_path, "llama tp=1", 4 * MIB)  # less than a process now holds before it loads
    start = Start(ledger, tmp_path)
    start.costs.reserve(40 * MIB, 0)
    assert start.loading() == 0
