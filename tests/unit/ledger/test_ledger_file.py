import os
import shutil
import signal
import struct
import threading
import time
from pathlib import Path

import pytest

from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import Granted, Ledger, Refusal
from kvtide.ledger import layout as w
from kvtide.ledger.creation import settle
from kvtide.ledger.lock import ChangeLock
from kvtide.units import MIB
from ledger_world import TOTAL, Member, enroll, spec, until


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def ledger(directory):
    ledger = Ledger.open(directory, spec())
    yield ledger
    ledger.close()


def poke(path, word, value):
    with path.open("r+b") as file:
        file.seek(word * 8)
        file.write(struct.pack("=q", value))


SPOILED = {
    "another layout": lambda path: poke(path, w.H_LAYOUT, 99),
    "no ledger": lambda path: poke(path, w.H_MAGIC, 1),
    "zeroed": lambda path: path.write_bytes(bytes(w.FILE_BYTES)),
    "too long": lambda path: os.truncate(path, w.FILE_BYTES + 1),
    "cut short": lambda path: os.truncate(path, 100),
    "cut in the tables": lambda path: os.truncate(path, w.FILE_BYTES // 2),
    "another total": lambda path: poke(path, w.H_TOTAL, TOTAL // 2),
    "another margin": lambda path: poke(path, w.H_MARGIN, 1),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_nobody_lives_by_is_made_anew(directory, spoil):
    Ledger.open(directory, spec()).close()
    spoil(directory / "host.ledger")
    ledger = Ledger.open(directory, spec())
    _, account = enroll(ledger, "a")
    assert account.grant(TOTAL) == Granted(TOTAL)
    ledger.close()


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_somebody_lives_by_is_refused_and_left_as_it_is(directory, spoil):
    with Member(directory, "enroll(ledger, 'a')"):
        path = directory / "host.ledger"
        spoil(path)
        before = path.read_bytes()
        with pytest.raises(LedgerError, match=r"in use.*end those first"):
            Ledger.open(directory, spec())
        assert path.read_bytes() == before


@pytest.mark.parametrize("spoil", [SPOILED["another layout"], SPOILED["cut short"]])
def test_observers_refuse_what_they_cannot_read(directory, spoil):
    Ledger.open(directory, spec()).close()
    spoil(directory / "host.ledger")
    for opening in (Ledger.read, Ledger.attach):
        with pytest.raises(LedgerError, match="cannot be read"):
            opening(directory / "host.ledger")


def test_other_settings_are_told_apart_by_name(ledger, directory):
    enroll(ledger, "a")
    for changes, named in (
        ({"margin_bytes": MIB}, "KVTIDE_MARGIN"),
        ({"budget_cap_bytes": MIB}, "KVTIDE_BUDGET"),
        ({"total_bytes": MIB}, "total"),
        ({"backend": "cuda"}, "backend"),
    ):
        with pytest.raises(LedgerError, match=named):
            Ledger.open(directory, spec(**changes))


def test_the_cap_of_the_creator_holds_for_who_has_none(directory):
    first = Ledger.open(directory, spec(budget_cap_bytes=8 * MIB))
    _, account = enroll(first, "a")
    second = Ledger.open(directory, spec())
    _, other = enroll(second, "b")
    assert account.grant(8 * MIB) == Granted(8 * MIB)
    assert isinstance(other.grant(1), Refusal)
    first.close()
    second.close()
    third = Ledger.open(directory, spec())  # nobody lives by it any more
    assert third.spec.budget_cap_bytes is None
    third.close()


def test_a_process_with_the_former_life_open_cannot_join_the_new_one(directory):
    old = Ledger.open(directory, spec())
    new = Ledger.open(directory, spec(margin_bytes=MIB))
    with pytest.raises(LedgerError, match="made anew"):
        old.register("a", explicit=True)
    old.close()
    new.close()


def test_keys_of_a_former_life_fit_nothing(directory):
    old = Ledger.open(directory, spec())
    instance, account = enroll(old, "a")
    old.close()
    new = Ledger.open(directory, spec(margin_bytes=MIB))
    enroll(new, "a")
    with pytest.raises(LedgerError, match="gone"):
        new.account(account.key)
    with pytest.raises(LedgerError, match="gone"):
        new.instance(instance.key)
    new.close()


@pytest.mark.parametrize("key", ["", "1", "1:x", "-1:1", "64:1", "999:1", "1:1:1", "²:1"])
def test_a_key_that_is_none_is_refused(ledger, key):
    for get in (ledger.instance, ledger.account):
        with pytest.raises(LedgerError):
            get(key)


def test_a_grant_notices_that_the_file_was_removed_replaced_or_cut(ledger, directory):
    _, account = enroll(ledger, "a")
    moved = directory / "moved"
    ledger.path.rename(moved)
    with pytest.raises(LedgerError, match="removed or replaced"):
        account.grant(1)
    shutil.copy(moved, ledger.path)
    with pytest.raises(LedgerError, match="removed or replaced"):
        account.grant(1)
    moved.rename(ledger.path)
    assert account.grant(1) == Granted(1)
    os.truncate(ledger.path, w.FILE_BYTES - 1)
    with pytest.raises(LedgerError, match="cut"):
        account.grant(1)


def test_closing_succeeds_though_the_file_is_gone(ledger):
    instance, account = enroll(ledger, "a")
    ledger.path.unlink()
    account.close()
    instance.close()


def test_a_link_in_the_file_s_place_is_refused(directory, tmp_path):
    Ledger.open(directory, spec()).close()
    (directory / "host.ledger").rename(tmp_path / "elsewhere")
    (directory / "host.ledger").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="symbolic link"):
        Ledger.open(directory, spec())


def test_a_directory_in_the_file_s_place_is_refused(directory):
    (directory / "host.ledger").mkdir(parents=True)
    directory.chmod(0o700)
    with pytest.raises(LedgerError):
        Ledger.open(directory, spec())


@pytest.mark.parametrize("size", [-1, 1 << 62, 1 << 63, 10**30])
def test_a_device_of_an_impossible_size_is_refused(directory, size):
    with pytest.raises(LedgerError):
        Ledger.open(directory, spec(total_bytes=size))


def test_a_stopped_holder_costs_one_wait_and_is_named(ledger, directory, monkeypatch):
    _, account = enroll(ledger, "a")
    with Member(directory, "ledger.file.begin()") as member:
        os.kill(member.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert account.grant(1) == Refusal("busy", 1, 0, False)
        with monkeypatch.context() as patched:
            # Within the pause after that miss nobody waits: a nap would fail here.
            patched.setattr("kvtide.ledger.lock.time.monotonic", lambda: began)
            patched.setattr("kvtide.ledger.lock.time.sleep", None)
            for _ in range(10):
                assert account.grant(1).reason == "busy"
        assert f"process {member.pid}" in ledger.file.busy()
        with pytest.raises(LedgerBusyError, match=str(member.pid)):
            ledger.set_limit("a", None)
        # Kept, not lost.
        account.refund(0)
        os.kill(member.pid, signal.SIGCONT)
        member.kill()
    until(lambda: account.grant(1) == Granted(1), "the lock of the dead is free")
    assert account.charge_bytes == 1


def test_a_miss_in_a_crowd_is_followed_by_a_patient_try(ledger, directory, monkeypatch):
    _, account = enroll(ledger, "a")
    other = Ledger.open(directory, spec())
    assert other.file.begin()
    naps = []

    def nap(_seconds):
        naps.append(1)
        other.file.words[w.H_SEQUENCE] += 2  # as if others had the lock in turns

    monkeypatch.setattr("kvtide.ledger.lock.time.sleep", nap)
    for _ in range(2):
        naps.clear()
        assert account.grant(1).reason == "busy"
        assert naps
    other.close()


def test_a_writer_who_died_in_the_middle_is_mended_by_the_next(ledger, directory):
    _, account = enroll(ledger, "a")
    account.grant(MIB)
    dying = (
        "_, own = enroll(ledger, 'b'); own.grant(5 << 20); ledger.file.begin(); "
        "words = ledger.file.words; from kvtide.ledger import layout as w; "
        "at = w.pool_at(1); words[w.H_BUDGET] -= words[at + w.P_CHARGE]; words[at] += 1"
    )
    with Member(directory, dying) as member:
        member.kill()
    words = ledger.file.words
    assert words[w.H_SEQUENCE] & 1
    # Observers read what the dead left: it stands still, and is safe.
    assert ledger.snapshot().charged_bytes == MIB
    until(lambda: account.grant(MIB) == Granted(MIB), "the lock of the dead is free")
    assert not words[w.H_SEQUENCE] & 1
    assert words[w.pool_at(1) + w.P_CHARGE] == 0
    assert ledger.snapshot().charged_bytes == 2 * MIB
    assert ledger.snapshot().budget_bytes == TOTAL - 5 * MIB


def test_observers_give_up_on_a_ledger_that_never_stands_still(ledger, monkeypatch):
    words = ledger.file.words

    class Moving:
        """As if a writer came between any two looks at the sequence."""

        def __getitem__(self, word):
            if word == w.H_SEQUENCE:
                words[word] += 2
            return words[word]

    monkeypatch.setattr(ledger.file, "words", Moving())
    before = words[w.H_SEQUENCE]
    with pytest.raises(LedgerBusyError, match="kept changing"):
        ledger.snapshot()
    assert words[w.H_SEQUENCE] == before + 2 * 2 * 100


def test_a_closed_ledger_says_so(directory):
    ledger = Ledger.open(directory, spec())
    instance, account = enroll(ledger, "a")
    ledger.close()
    ledger.close()
    for use in (
        lambda: account.grant(1),
        lambda: account.created(1),
        lambda: account.sample(),
        lambda: instance.wish(1),
        lambda: instance.limit_bytes,
        ledger.snapshot,
        ledger.retire_dead,
    ):
        with pytest.raises(LedgerError, match="closed"):
            use()
    account.close()
    instance.close()


def test_nothing_is_left_open(directory):
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        ledger = Ledger.open(directory, spec())
        instance, account = enroll(ledger, "a")
        waker = instance.waker()
        waker.close()
        account.close()
        instance.close()
        ledger.close()
        with Ledger.read(directory / "host.ledger") as observer:
            observer.snapshot()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert [path.name for path in directory.iterdir()] == ["host.ledger"]


def test_a_full_filesystem_is_told_when_the_file_is_made(directory, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LedgerError, match="No space left"):
        Ledger.open(directory, spec())
    monkeypatch.undo()
    Ledger.open(directory, spec()).close()


def half_made(path, *, empty):
    """A ledger that somebody is about to make, or makes: its lock is held; what ends that."""
    path.parent.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    lock = ChangeLock(fd)
    if not empty:
        assert lock.acquire()
        os.truncate(fd, w.FILE_BYTES)

    def finish():
        if empty:
            assert lock.acquire()
        settle(fd, path, spec())
        lock.release()
        os.close(fd)

    return finish


@pytest.mark.parametrize("empty", [True, False], ids=["before its lock", "under it"])
@pytest.mark.parametrize("look", [Ledger.read, Ledger.attach], ids=["who reads", "who changes"])
def test_who_looks_at_a_ledger_that_is_being_made_sees_it_whole(directory, look, empty):
    path = directory / "host.ledger"
    later = threading.Timer(0.02, half_made(path, empty=empty))
    later.start()
    try:
        found = look(path)
    finally:
        later.join()
    assert found.snapshot().charged_bytes == 0
    found.close()


def test_an_empty_file_that_nobody_makes_a_ledger_of_is_told_soon(directory):
    half_made(directory / "host.ledger", empty=True)
    with pytest.raises(LedgerError, match=r"cut short \(0 bytes\)"):
        Ledger.read(directory / "host.ledger")
