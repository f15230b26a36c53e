"""A ledger that was cut, flipped, wiped, replaced: said clearly, used for nothing, made anew."""

import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
from surroundings import ChildDiedError, assert_whole, become, in_child

from kvtide.errors import KvtideError, LedgerError
from kvtide.ledger import Granted, Ledger, PoolFigures
from kvtide.ledger import layout as w
from kvtide.ledger.file import LOOK_SECONDS
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec

FLIPS = 2000


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "kv"


def assert_usable(directory: Path) -> None:
    """With nobody living by it the ledger is whole again, and all of the device is to be had."""
    ledger = Ledger.open(directory, spec())
    _, account = enroll(ledger, "fresh")
    assert account.grant(TOTAL) == Granted(TOTAL)
    account.refund(TOTAL)
    account.close()
    assert_whole(ledger)
    ledger.close()


def everything(ledger: Ledger, instance, account) -> dict:
    """Every use of a ledger, by name."""
    return {
        "snapshot": ledger.snapshot,
        "read": lambda: read_once(ledger.path),
        "attach": lambda: Ledger.attach(ledger.path).close(),
        "open": lambda: Ledger.open(ledger.path.parent, spec()).close(),
        "is_owing": lambda: ledger.is_owing(instance),
        "demands": lambda: ledger.demands(instance),
        "grant": lambda: account.grant(2 * MIB),
        "created": lambda: account.created(2 * MIB),
        "released": lambda: account.released(2 * MIB),
        "refund": lambda: account.refund(2 * MIB),
        "publish": lambda: account.publish(PoolFigures(1, 1, 0, 1, 2 * MIB)),
        "sample": account.sample,
        "wish": lambda: instance.wish(3 * MIB),
        "reserve": lambda: instance.reserve(MIB),
        "loaded": lambda: instance.loaded(MIB),
        "measured": lambda: instance.measured(MIB, "given"),
        "room": lambda: instance.room_bytes,
        "retire_dead": ledger.retire_dead,
        "set_limit": lambda: ledger.set_limit(instance.name, 100 * MIB),
        "ask_to_trim": lambda: ledger.ask_to_trim(instance.name, 0),
        "register": lambda: ledger.register("late", explicit=False).close(),
        "enroll": lambda: ledger.enroll(
            instance,
            pool_name="late",
            rank=1,
            blocks_total=1,
            block_bytes=1,
            sampler=lambda: TOTAL,
        ).close(),
        "close account": account.close,
        "close instance": instance.close,
    }


def read_once(path: Path) -> None:
    with Ledger.read(path) as observer:
        observer.snapshot()


@pytest.mark.long
def test_flipped_bits_end_in_words_and_never_in_a_crash_or_a_hang(directory):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    told = 0
    for _ in range(FLIPS // 16):
        ledger = Ledger.open(directory, spec())
        instance, account = enroll(ledger, "a")
        other, neighbour = enroll(ledger, "b")
        account.grant(20 * MIB)
        account.created(20 * MIB)
        neighbour.grant(4 * MIB)
        other.wish(4 * MIB)
        for _ in range(16):
            kind = dice.randrange(3)
            at = (
                dice.randrange(w.H_NAME + 16)
                if kind == 0
                else (w.instance_at if kind == 1 else w.pool_at)(dice.randrange(4))
                + dice.randrange(48)
            )
            bit = dice.randrange(64)
            word = ledger.file.raw[at * 8 : at * 8 + 8].tobytes()
            ledger.file.raw[at * 8 + bit // 8] ^= 1 << bit % 8
            uses = everything(ledger, instance, account)
            for name in dice.sample(list(uses)[:-2], 6):
                try:
                    uses[name]()
                except KvtideError:
                    told += 1
            ledger.file.raw[at * 8 : at * 8 + 8] = word
        ledger.file.raw[dice.randrange(w.FILE_BYTES)] ^= 0xFF
        for name, use in everything(ledger, instance, account).items():
            try:
                use()
            except KvtideError:
                told += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}: {name} broke down") from error
        ledger.close()
    assert told > FLIPS // 16
    assert_usable(directory)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (w.H_MAGIC, 0),
        (w.H_LAYOUT, 77),
        (w.H_POOLS_HIGH, w.MAX_POOLS + 1),
        (w.H_POOLS_HIGH, -1),
        (w.H_POOLS_HIGH, 0),
        (w.H_INSTANCES_HIGH, 1 << 40),
        (w.H_INSTANCES_HIGH, 0),
        (w.H_TICKET_PUBLISHED, 1 << 50),
        (w.H_BUDGET, 1 << 62),
        (w.H_GRANULARITY, 0),
        (w.H_TOTAL, -1),
        (w.H_MARGIN, 1 << 62),
        (w.H_CAP, -2),
        (w.instance_at(0) + w.I_STATE, 9),
        (w.instance_at(0) + w.I_NON_KV_SOURCE, 9),
        (w.instance_at(0) + w.I_MIN, -1),
        (w.instance_at(0) + w.I_LIMIT, -2),
        (w.pool_at(0) + w.P_CHARGE, -1),
        (w.pool_at(0) + w.P_CREATED, 1 << 62),
        (w.pool_at(0) + w.P_INSTANCE, w.MAX_INSTANCES),
    ],
)
def test_what_cannot_be_is_refused_to_everybody_and_made_anew_once_nobody_lives(
    directory, word, value
):
    ledger = Ledger.open(directory, spec())
    enroll(ledger, "a")
    ledger.file.words[word] = value
    with pytest.raises(LedgerError, match="damaged"):
        ledger.sample(lambda: TOTAL)
    for look in (ledger.snapshot, lambda: read_once(ledger.path)):
        with pytest.raises(LedgerError, match=r"damaged|cannot be read"):
            look()
    with pytest.raises(LedgerError, match=r"in use and not the one expected.*|damaged"):
        Ledger.open(directory, spec())
    ledger.close()
    assert_usable(directory)


def test_a_charge_below_nothing_or_a_budget_above_the_device_lends_nothing(directory):
    ledger = Ledger.open(directory, spec(margin_bytes=6 * MIB))
    _, account = enroll(ledger, "a", lambda: TOTAL)
    _, other = enroll(ledger, "b", lambda: TOTAL)
    ledger.file.words[w.H_BUDGET] = TOTAL + (1 << 40)
    refusal = account.grant(TOTAL)
    assert refusal.reason == "budget"
    assert refusal.available_bytes == TOTAL - 6 * MIB
    account.sample()
    ledger.file.words[w.pool_at(1) + w.P_CHARGE] = -(1 << 40)
    with pytest.raises(LedgerError, match="damaged"):
        account.grant(TOTAL)
    ledger.file.words[w.pool_at(1) + w.P_CHARGE] = 0
    ledger.file.words[w.H_POOLS_HIGH] = 1
    with pytest.raises(LedgerError, match="damaged"):
        other.grant(TOTAL)
    ledger.close()


def test_zeroed_under_the_living_it_lends_nothing_and_is_kept_until_they_end(directory):
    ledger = Ledger.open(directory, spec())
    instance, account = enroll(ledger, "a")
    account.grant(MIB)
    ledger.path.write_bytes(bytes(w.FILE_BYTES))
    for name, use in everything(ledger, instance, account).items():
        try:
            answer = use()
        except KvtideError:
            continue
        # The record is gone, so there is nothing to refund, to count or to publish.
        quiet = ("is_owing", "created", "released", "refund", "publish")
        assert name in (*quiet, "close account", "close instance"), (name, answer)
        assert not isinstance(answer, Granted)
    assert ledger.path.read_bytes()[: w.FILE_BYTES - w.WORD_BYTES].count(0) > w.FILE_BYTES - 4096
    ledger.close()
    assert_usable(directory)


@pytest.mark.parametrize("size", [0, 100, 4096, w.FILE_BYTES // 2, w.FILE_BYTES - 1])
def test_cut_under_the_living_every_use_says_so_and_touches_nothing_beyond_the_end(directory, size):
    def live_on() -> dict:
        ledger = Ledger.open(directory, spec())
        instance, account = enroll(ledger, "a")
        account.grant(2 * MIB)
        observer = Ledger.read(ledger.path)
        os.truncate(ledger.path, size)
        time.sleep(LOOK_SECONDS)
        said = {}
        uses = everything(ledger, instance, account) | {"observe": observer.snapshot}
        for name, use in uses.items():
            try:
                said[name] = repr(use())
            except LedgerError as error:
                said[name] = str(error)
        observer.close()
        ledger.close()
        return said

    said = in_child(live_on)
    quiet = {"close account", "close instance"}
    assert all("cut" in text for name, text in said.items() if name not in quiet), said
    assert {said[name] for name in quiet} == {"None"}
    assert_usable(directory)


def test_who_touches_it_just_as_it_is_cut_dies_at_once_and_leaves_nothing(directory):
    """Between a look at its size and the touch no program can help it: the kernel ends it."""

    def touch() -> None:
        ledger = Ledger.open(directory, spec())
        enroll(ledger, "a")
        os.truncate(ledger.path, 0)
        ledger.file.words[w.pool_at(0) + w.P_CREATED] += 1

    with pytest.raises(ChildDiedError) as died:
        in_child(touch)
    assert died.value.status == -signal.SIGBUS
    assert_usable(directory)


@pytest.mark.parametrize("layout", [w.LAYOUT + 1, 1 << 40, -1])
def test_a_future_layout_is_left_alone_while_somebody_lives_by_it(directory, layout):
    ledger = Ledger.open(directory, spec())
    enroll(ledger, "newer")
    ledger.file.words[w.H_LAYOUT] = layout
    for attempt in (
        lambda: Ledger.open(directory, spec()),
        lambda: Ledger.attach(ledger.path),
        lambda: Ledger.read(ledger.path),
    ):
        with pytest.raises(LedgerError, match=f"layout is version {layout}"):
            attempt()
    assert ledger.file.words[w.H_LAYOUT] == layout
    ledger.close()
    assert_usable(directory)


def test_deleted_and_made_anew_under_the_living_they_stop_and_others_go_on(directory):
    old = Ledger.open(directory, spec())
    instance, account = enroll(old, "old")
    assert account.grant(10 * MIB) == Granted(10 * MIB)
    account.created(10 * MIB)
    old.path.unlink()
    new = Ledger.open(directory, spec())
    # What the old one holds is foreign memory to the new ledger: its samples find it.
    foreign = [10 * MIB]
    _, fresh = enroll(new, "new", lambda: TOTAL - sum(foreign))
    for act in (
        lambda: account.grant(1),
        account.sample,
        lambda: old.register("more", explicit=True),
        lambda: old.set_limit("old", 1),
        lambda: instance.reserve(1),
    ):
        with pytest.raises(LedgerError, match="removed or replaced"):
            act()
    refusal = fresh.grant(TOTAL)
    assert refusal.available_bytes == TOTAL - 10 * MIB
    # It can still give back and end.
    account.released(10 * MIB)
    account.close()
    instance.close()
    old.close()
    foreign.clear()
    assert fresh.sample()
    assert fresh.grant(TOTAL) == Granted(TOTAL)
    new.close()


def test_a_link_a_directory_a_fifo_and_a_socket_in_its_place_are_refused(directory, tmp_path):
    Ledger.open(directory, spec()).close()
    path = directory / "host.ledger"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    before = elsewhere.read_bytes()
    makers = {
        "symbolic link": lambda: path.symlink_to(elsewhere),
        "directory": path.mkdir,
        "not a plain file": lambda: os.mkfifo(path),
        "No such device": lambda: os.mknod(path, stat.S_IFSOCK | 0o600),
    }
    for what, make in makers.items():
        make()
        for attempt in (
            lambda: Ledger.open(directory, spec()),
            lambda: Ledger.attach(path),
            lambda: Ledger.read(path),
        ):
            with pytest.raises(LedgerError, match=rf"{what}|plain file|directory"):
                attempt()
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert elsewhere.read_bytes() == before
    dangling = tmp_path / "nothing"
    path.symlink_to(dangling)
    with pytest.raises(LedgerError, match="symbolic link"):
        Ledger.open(directory, spec())
    assert not dangling.exists(), "a link was followed to make a file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_ledger_and_directory_are_refused_and_unread(directory):
    Ledger.open(directory, spec()).close()
    path = directory / "host.ledger"

    def as_another() -> list[str]:
        become(4321)
        said = []
        for attempt in (
            lambda: Ledger.open(directory, spec()),
            lambda: Ledger.attach(path),
            lambda: Ledger.read(path),
            lambda: Ledger.existing(directory),
        ):
            try:
                attempt()
            except LedgerError as error:
                said.append(str(error))
        return said

    for parent in directory.parents:  # another user must come as far as the directory itself
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    said = in_child(as_another)
    assert len(said) == 4
    assert all("belongs to user 0" in text for text in said), said
    # And the other way round, with the file alone another's.
    os.chown(path, 4321, 4321)
    with pytest.raises(LedgerError, match="belongs to user 4321"):
        Ledger.open(directory, spec())
