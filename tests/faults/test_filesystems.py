"""Filesystems that are full, read-only, or not the ones that others see."""

import contextlib
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from surroundings import can_mount, in_child, make_read_only, mount_memory, own_mounts

from kvtide.device.host import HostDevice
from kvtide.errors import LedgerError
from kvtide.ledger import DeviceSpec, Granted, Ledger
from kvtide.memory import Arena, Span
from kvtide.observe.logs import set_up
from kvtide.observe.tally import Cause, Kind, Owner, Tally
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec

MOUNTS = can_mount()


def refused(act) -> str:
    try:
        act()
    except LedgerError as error:
        return str(error)
    raise AssertionError("it was not refused")


@contextlib.contextmanager
def failing(module, name: str, number: int):
    """A system call that answers with an error, for where nothing can be mounted."""
    real = getattr(module, name)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    setattr(module, name, fail)
    try:
        yield
    finally:
        setattr(module, name, real)


@pytest.mark.parametrize("pages", ["2", "20", "42"])
def test_a_full_filesystem_is_said_and_leaves_no_half_made_ledger_in_use(tmp_path, pages):
    def start() -> tuple[str, str]:
        where = tmp_path / "small"
        where.mkdir(mode=0o700)
        if not MOUNTS:
            with failing(os, "posix_fallocate", errno.ENOSPC):
                said = refused(lambda: Ledger.open(where, spec()))
        else:
            own_mounts()
            mount_memory(where, f"size={int(pages) * 4096},mode=700")
            if pages == "42":
                # Room for the ledger itself, and for nothing more.
                ledger = Ledger.open(where, spec())
                instance, account = enroll(ledger, "a")
                assert account.grant(TOTAL) == Granted(TOTAL)
                tally = Tally(ledger.path, Owner.of_key("rank", account.key))
                tally.note(Kind.GROW, Cause.NEED, MIB)
                tally.close()
                account.close()
                instance.close()
                ledger.close()
                return "cannot be written", "went on"
            said = refused(lambda: Ledger.open(where, spec()))
            mount_memory(where, "size=1m,mode=700")
        # As soon as there is room it works, half-made file or not.
        ledger = Ledger.open(where, spec())
        _, account = enroll(ledger, "a")
        granted = account.grant(TOTAL)
        ledger.close()
        return said, "went on" if granted == Granted(TOTAL) else "stuck"

    said, after = in_child(start)
    assert "cannot be written" in said
    assert after == "went on"


def test_without_room_for_a_socket_an_engine_is_told_so(tmp_path):
    def start() -> str:
        where = tmp_path / "small"
        where.mkdir(mode=0o700)
        if not MOUNTS:
            return "no wake-up socket"
        own_mounts()
        mount_memory(where, "size=1m,nr_inodes=2,mode=700")
        ledger = Ledger.open(where, spec())
        instance, _ = enroll(ledger, "a")
        said = refused(instance.waker)
        ledger.close()
        return said

    assert "no wake-up socket" in in_child(start)


def test_a_read_only_filesystem_can_be_looked_at_and_nothing_else(tmp_path):
    def start() -> dict[str, str]:
        where = tmp_path / "fixed"
        where.mkdir(mode=0o700)
        if MOUNTS:
            own_mounts()
            mount_memory(where, "size=1m,mode=700")
        ledger = Ledger.open(where, spec())
        enroll(ledger, "a")
        said = {}
        if MOUNTS:
            ledger.close()
            make_read_only(where)
            said["open"] = refused(lambda: Ledger.open(where, spec()))
            said["attach"] = refused(lambda: Ledger.attach(ledger.path))
            said["make"] = refused(lambda: Ledger.open(where / "below", spec()))
        else:
            with failing(os, "open", errno.EROFS):
                said["open"] = refused(lambda: Ledger.open(where, spec()))
                said["attach"] = refused(lambda: Ledger.attach(ledger.path))
            with failing(Path, "mkdir", errno.EROFS):
                said["make"] = refused(lambda: Ledger.open(where / "below", spec()))
        with Ledger.read(ledger.path) as observer:
            (view,) = observer.snapshot().instances
        said["seen"] = view.name
        return said

    said = in_child(start)
    assert said.pop("seen") == "a"
    assert all("Read-only file system" in text for text in said.values()), said


def test_two_containers_with_the_same_path_on_different_filesystems_share_what_is_really_there(
    tmp_path,
):
    """Each has a ledger of its own, so neither knows the other: the device itself is the judge."""
    uuid = f"test-containers-{os.getpid()}"
    device_spec = DeviceSpec(uuid, "host", "test", 64 * MIB, 0, None, 2 * MIB)

    def container(number: int) -> Path:
        where = tmp_path / ("shared" if MOUNTS else f"own-{number}")
        where.mkdir(mode=0o700, exist_ok=True)
        return where

    def grow_all(ledger: Ledger, account, arena: Arena) -> int:
        grown = 0
        for n in range(32):
            if not isinstance(account.grant(2 * MIB), Granted):
                break
            if not arena.grow([Span(n * 2 * MIB, 2 * MIB)]):
                account.refund(2 * MIB)
                account.sample()
                break
            grown += 1
        return grown

    def hold(number: int, then=None):
        def run():
            if MOUNTS:
                own_mounts()
                mount_memory(container(number), "size=1m,mode=700")
            device = HostDevice(64 * MIB, uuid=uuid)
            ledger = Ledger.open(container(number), device_spec)
            _, account = enroll(ledger, "same-name", device.free_bytes)
            arena = Arena(device, 64 * MIB, account)
            mine = grow_all(ledger, account, arena)
            other = in_child(then) if then is not None else None
            assert arena.mapped_bytes == mine * 2 * MIB
            budget = ledger.snapshot().budget_bytes
            arena.close()
            ledger.close()
            return mine, other, budget

        return run

    def second():
        mine, _, budget = hold(2)()
        return mine, budget

    def first():
        device = HostDevice(64 * MIB, uuid=uuid)
        arena = Arena(device, 64 * MIB, _Counts())
        arena.grow([Span(n * 2 * MIB, 2 * MIB) for n in range(8)])
        result = in_child(hold(1, second))
        arena.close()
        return result

    mine, (others, budget), _ = in_child(first)
    # Of 32 granules the first process has 8 outside of any ledger. Who comes first gets the rest,
    # and to who comes later the samples show that nothing is left: nobody gets what is not there.
    assert mine == 24
    assert others == 0
    assert budget == 0


class _Counts:
    def created(self, size_bytes: int) -> None: ...

    def released(self, size_bytes: int) -> None: ...


def test_a_disk_full_log_stops_nothing(tmp_path):
    """Standard error goes to a device that is always full: events are lost, the engine is not."""

    def serve() -> str:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 2)
        set_up("json")
        logging.getLogger("kvtide.memory").warning("2 MiB stay mapped")
        ledger = Ledger.open(tmp_path / "kv", spec())
        _, account = enroll(ledger, "a")
        logging.getLogger("kvtide.events").info("grows", extra={"kvtide": {"bytes": 1}})
        granted = account.grant(2 * MIB)
        ledger.close()
        return repr(granted)

    assert in_child(serve) == repr(Granted(2 * MIB))


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["doctor"]])
def test_a_command_whose_output_goes_to_a_full_disk_says_so_in_one_line(tmp_path, command):
    Ledger.open(tmp_path / "kv", spec()).close()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from kvtide.cli import main; main()", *command],
            env={**os.environ, "KVTIDE_DIR": str(tmp_path / "kv")},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
        )
    assert done.returncode == 1
    assert done.stderr == "kvtide: the output cannot be written: No space left on device\n"
