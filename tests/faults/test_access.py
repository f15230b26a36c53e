"""Who may use a ledger: one user, or by choice one group; others get nothing and change nothing."""

import hmac
import os
import socket
import stat
from pathlib import Path

import pytest
from surroundings import Child, become, in_child

from kvtide.errors import KvtideError, LedgerError
from kvtide.ledger import Granted, Ledger
from kvtide.observe.health import check_ledgers
from kvtide.observe.tallies import read_tally
from kvtide.observe.tally import Owner, Tally
from kvtide.serve.token import Token
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec

ROOT = os.geteuid() == 0
GROUP, ALICE, BOB, EVE = 4500, 4501, 4502, 4503
as_root = pytest.mark.skipif(not ROOT, reason="only root can be other users")


def gpu_spec(**changes):
    return spec(uuid="GPU-test", backend="cuda", **changes)


def modes(directory: Path) -> dict[str, str]:
    return {path.name: f"{stat.S_IMODE(path.lstat().st_mode):04o}" for path in directory.iterdir()}


def reachable(path: Path) -> None:
    for above in path.parents:
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o111)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_whatever_the_umask_all_files_are_for_their_user_alone(tmp_path, umask):
    def run() -> dict[str, str]:
        os.umask(umask)
        ledger = Ledger.open(tmp_path / "kv", spec())
        instance, account = enroll(ledger, "a")
        instance.waker()
        Tally(ledger.path, Owner.of_key("rank", account.key))
        Token(tmp_path / "kv")
        found = modes(tmp_path / "kv")
        found["."] = f"{stat.S_IMODE((tmp_path / 'kv').stat().st_mode):04o}"
        return found

    found = in_child(run)
    assert found.pop(".") == "0700"
    assert len(found) == 4
    assert set(found.values()) == {"0600"}, found


@as_root
def test_another_user_sees_and_changes_nothing(tmp_path):
    directory = tmp_path / "kv"
    ledger = Ledger.open(directory, spec())
    instance, _ = enroll(ledger, "a")
    waker = instance.waker()
    (wake,) = directory.glob("*.wake")
    token = Token(directory)
    reachable(directory)

    def intrude() -> dict[str, str]:
        become(EVE)
        said = {}
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for what, act in {
            "list": lambda: list(directory.iterdir()),
            "read": lambda: (directory / "host.ledger").read_bytes(),
            "token": token.path.read_text,
            "wake": lambda: sender.sendto(b"!", str(wake)),
            "remove": (directory / "host.ledger").unlink,
            "rename": lambda: directory.rename(directory.with_name("mine")),
        }.items():
            try:
                act()
            except PermissionError as error:
                said[what] = str(error.errno)
        return said

    assert set(in_child(intrude)) == {"list", "read", "token", "wake", "remove", "rename"}
    assert not waker.wait(0)
    waker.close()
    ledger.close()


def test_a_path_that_anybody_could_exchange_is_not_trusted(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for below in (open_to_all / "kv", open_to_all / "private" / "kv"):
        below.parent.mkdir(mode=0o700, exist_ok=True)
        with pytest.raises(LedgerError, match=r"where anybody could exchange it \(mode 0777\)"):
            Ledger.open(below, spec())
        with pytest.raises(LedgerError, match="exchange"):
            Ledger.attach(below / "host.ledger")
    # As /tmp and /dev/shm are: sticky, so that nobody exchanges what is another's.
    open_to_all.chmod(0o1777)
    Ledger.open(open_to_all / "kv", spec()).close()


@as_root
def test_a_directory_that_another_user_has_laid_out_is_not_taken_for_shared(tmp_path):
    """Else anybody could be the one who made /dev/shm/kvtide-1000 first."""
    directory = tmp_path / "kvtide-4501"
    directory.mkdir()
    os.chown(directory, EVE, GROUP)
    directory.chmod(0o2770)
    reachable(directory)

    def use() -> str:
        become(ALICE, GROUP)
        try:
            Ledger.open(directory, gpu_spec())
        except LedgerError as error:
            return str(error)
        return "it was used"

    assert f"belongs to user {EVE}" in in_child(use)


@pytest.fixture
def shared(tmp_path):
    """As docs/operate.md says: install -d -m 2770 -g GROUP DIRECTORY, by root."""
    directory = tmp_path / "shared"
    directory.mkdir()
    os.chown(directory, 0, GROUP)
    directory.chmod(0o2770)
    reachable(directory)
    return directory


@as_root
def test_a_group_shares_a_device_by_a_setgid_directory(shared):
    def alice() -> None:
        become(ALICE, GROUP)
        os.umask(0o077)
        ledger = Ledger.open(shared, gpu_spec())
        instance, account = enroll(ledger, "alices")
        account.grant(100 * MIB)
        instance.waker()
        os.kill(os.getpid(), 19)  # SIGSTOP: she lives on
        os._exit(0)

    first = Child(alice)
    assert first.waits_for_signal()
    assert set(modes(shared).values()) == {"0660"}, modes(shared)

    def bob() -> list[object]:
        become(BOB, GROUP)
        os.umask(0o022)
        ledger = Ledger.open(shared, gpu_spec())
        instance, account = enroll(ledger, "bobs")
        seen = [i.name for i in ledger.snapshot().instances]
        rest = account.grant(TOTAL - 100 * MIB)
        more = account.grant(1)
        instance.wish(4 * MIB)  # wakes her, by a socket that is hers
        revision = ledger.set_limit("alices", 200 * MIB)
        return [seen, rest, more.reason, revision]

    assert in_child(bob) == [["alices", "bobs"], Granted(TOTAL - 100 * MIB), "budget", 2]
    first.send(9)
    first.end()

    def bob_again() -> tuple[int, list[str]]:
        become(BOB, GROUP)
        ledger = Ledger.open(shared, gpu_spec())
        ended = ledger.retire_dead()
        return ended, sorted(path.name for path in shared.iterdir())

    # Whoever comes next retires the dead of other users too, and sweeps what they left.
    assert in_child(bob_again) == (4, ["GPU-test.ledger"])


@as_root
@pytest.mark.parametrize("mode", [0o2775, 0o2777, 0o3777, 0o2750, 0o6770])
def test_a_shared_directory_is_for_its_group_and_nobody_else(shared, mode):
    shared.chmod(mode)

    def use() -> str:
        become(ALICE, GROUP)
        try:
            Ledger.open(shared, gpu_spec())
        except LedgerError as error:
            return str(error)
        return "it was used"

    said = in_child(use)
    assert "chmod 2770" in said, said


@as_root
def test_who_is_not_in_the_group_gets_nothing_of_a_shared_directory(shared):
    Ledger.open(shared, gpu_spec()).close()

    def use() -> list[str]:
        become(EVE)
        said = []
        for act in (
            lambda: Ledger.open(shared, gpu_spec()),
            lambda: Ledger.attach(shared / "GPU-test.ledger"),
            lambda: Ledger.read(shared / "GPU-test.ledger"),
        ):
            try:
                act()
            except LedgerError as error:
                said.append(str(error))
        return said

    said = in_child(use)
    assert len(said) == 3
    assert all("not in it" in text for text in said), said


@as_root
def test_the_host_device_is_not_shared_by_a_group(shared):
    """Nobody may look into another user's processes, so what they hold would be lent again."""
    with pytest.raises(LedgerError, match="what another user's processes hold cannot be seen"):
        Ledger.open(shared, spec())


@as_root
def test_a_file_in_a_shared_directory_that_others_could_read_is_refused(shared):
    Ledger.open(shared, gpu_spec()).close()
    path = shared / "GPU-test.ledger"
    path.chmod(0o664)

    def use() -> str:
        become(ALICE, GROUP)
        try:
            Ledger.open(shared, gpu_spec())
        except LedgerError as error:
            return str(error)
        return "it was used"

    assert "is not for group" in in_child(use)


def test_the_token_is_compared_in_constant_time(tmp_path, monkeypatch):
    token = Token(tmp_path / "kv")
    compared = []
    real = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    right = f"Bearer {token.text}"
    assert token.matches(right)
    for wrong in (None, "", "Bearer ", token.text, right[:-1], right + "x", "Bearer \udcff", "é"):
        assert not token.matches(wrong)
    assert len(compared) == 9, "every answer came from the one comparison that tells no more"
    assert {b for _, b in compared} == {right.encode()}


def test_a_token_that_others_could_have_read_is_refused(tmp_path):
    token = Token(tmp_path / "kv")
    token.path.chmod(0o640)
    with pytest.raises(KvtideError, match="can be read by others"):
        Token(tmp_path / "kv")
    token.path.unlink()
    token.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KvtideError, match="cannot be used"):
        Token(tmp_path / "kv")


def test_no_secret_is_in_what_is_said_of_it(tmp_path):
    token = Token(tmp_path / "kv")
    assert token.text not in repr(token)
    token.path.chmod(0o644)
    with pytest.raises(KvtideError) as refused:
        Token(tmp_path / "kv")
    assert token.text not in str(refused.value)


@as_root
def test_a_group_reads_each_others_counters_and_each_has_a_token_of_its_own(shared):
    def alice() -> str:
        become(ALICE, GROUP)
        ledger = Ledger.open(shared, gpu_spec())
        _, account = enroll(ledger, "a")
        tally = Tally(ledger.path, Owner.of_key("rank", account.key))
        assert tally.path is not None
        Token(shared)
        return str(tally.path)

    def bob(path: str) -> None:
        become(BOB, GROUP)
        assert read_tally(Path(path)) is not None
        Token(shared)
        assert {f"serve-{who}.token" for who in (ALICE, BOB)} <= set(modes(shared))
        foreign = [f for f in check_ledgers(shared) if "belongs to user" in f.found]
        assert foreign == []

    path = in_child(alice)
    in_child(lambda: bob(path))
    assert {m for name, m in modes(shared).items() if name.endswith(".token")} == {"0600"}


def test_a_pipe_in_the_place_of_counters_holds_no_reader_up(tmp_path):
    os.mkfifo(tmp_path / "x.tally")
    assert read_tally(tmp_path / "x.tally") is None
