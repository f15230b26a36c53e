"""Limits of a process and of a ledger: descriptors, mappings, address space, records."""

import gc
import mmap
import os
import resource
import socket
import warnings

import pytest
from surroundings import descriptors, in_child

from kvtide.device import census
from kvtide.device.host import HostDevice
from kvtide.errors import DeviceError, KvtideError, LedgerError
from kvtide.ledger import Granted, Ledger
from kvtide.ledger import layout as w
from kvtide.memory import Arena, Span
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.messages import Grow, Sample
from kvtide.ranks.sockets import RankSocket, SchedulerSocket
from kvtide.ranks.watch import Watch
from kvtide.units import GIB, MIB
from ledger_world import TOTAL, enroll, spec

GRANULE = 2 * MIB
MOST = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


class Meter:
    held_bytes = 0

    def created(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes

    def released(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


def allow_descriptors(more: int) -> None:
    """Leave room for so many more, wherever the gaps are."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 - one descriptor
    low, free = 0, more
    while free or low in used:
        free -= low not in used
        low += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, MOST))


def allow_all() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST, 4096), MOST))


def outcome(act) -> str:
    """What it made, or its clear refusal; anything else is a fault."""
    warnings.simplefilter("error")
    try:
        act()
    except KvtideError as error:
        return str(error)
    return "done"


def test_what_an_earlier_test_left_open_is_no_descriptor_that_a_child_closes():
    """Else a test that fails makes those fail that count after it."""
    left: list = [socket.socket()]
    left.append(left)
    only = [left]
    del left

    def run() -> tuple[int, int]:
        only.clear()
        before = descriptors()
        gc.collect()
        return before, descriptors()

    before, after = in_child(run)
    only[0][0].close()
    assert before == after


def test_a_ledger_opens_or_says_why_at_every_limit_of_descriptors_and_leaks_none(tmp_path):
    directory = tmp_path / "kv"
    Ledger.open(directory, spec()).close()

    def run() -> list[str]:
        said = []

        def use() -> None:
            ledger = Ledger.open(directory, spec())
            try:
                instance, account = enroll(ledger, "a")
                waker = instance.waker()
                watch = Watch([waker], [ledger], lambda: None)
                watch.close()
                account.close()
                instance.close()
            finally:
                ledger.close()

        use()
        gc.collect()
        before = descriptors()
        for more in range(14):
            allow_descriptors(more)
            said.append(outcome(use))
            allow_all()
            gc.collect()
            assert descriptors() == before, f"{more}: {said[-1]}"
        with Ledger.read(directory / "host.ledger") as observer:
            assert observer.snapshot().instances == ()
        return said

    said = in_child(run)
    assert said[0] != "done"
    assert said[-1] == "done"
    assert all(text == "done" or "Too many open files" in text for text in said), said


def test_sockets_of_ranks_open_or_say_why_at_every_limit_of_descriptors():
    def run() -> list[str]:
        said = []

        def use() -> None:
            rank = RankSocket()
            try:
                scheduler = SchedulerSocket(rank.address)
                try:
                    rank.send(b"1")
                finally:
                    scheduler.close()
            finally:
                rank.close()

        use()
        gc.collect()
        before = descriptors()
        for more in range(5):
            allow_descriptors(more)
            said.append(outcome(use))
            allow_all()
            gc.collect()
            assert descriptors() == before
        return said

    said = in_child(run)
    assert said[0] != "done"
    assert said[-1] == "done"


def test_without_descriptors_nobody_takes_unseen_memory_for_free(tmp_path):
    """What the kernel cannot be asked is not free: no sample, no create, and no crash."""
    uuid = f"test-descriptors-{os.getpid()}"

    def run() -> tuple[str, bool, bool, bool]:
        device = HostDevice(64 * MIB, uuid=uuid)
        ledger = Ledger.open(tmp_path / "kv", spec(uuid=uuid, total_bytes=64 * MIB))
        _, account = enroll(ledger, "a", device.free_bytes)
        account.grant(32 * MIB)
        memory = RankMemory(device, 64 * MIB, account)
        allow_descriptors(0)
        said = outcome(device.free_bytes)
        (answer,) = memory.carry_out((Sample(1),))
        # The machine's own count of shared memory may bound it without a look at anybody.
        (grown,) = memory.carry_out((Grow(2, ((0, GRANULE),)),))
        whole = account.charge_bytes - memory.arena.mapped_bytes >= 0
        allow_all()
        (again,) = memory.carry_out((Grow(3, ((8 * MIB, GRANULE),)),))
        memory.close()
        account.close()
        ledger.close()
        return said, answer.done, whole and grown.done in (True, False), again.done

    said, sampled, whole, again = in_child(run)
    assert "Too many open files" in said
    assert sampled, "an order to sample is answered although there was no sample"
    assert whole
    assert again
    assert census.used_bytes(uuid) == 0


def test_a_create_that_cannot_be_judged_any_more_gives_its_memory_back(monkeypatch):
    device = HostDevice(64 * MIB, uuid=f"test-judged-{os.getpid()}")
    answers = iter([True])

    def has_room(size_bytes: int) -> bool:
        try:
            return next(answers)
        except StopIteration:
            raise DeviceError("who holds memory cannot be seen") from None

    monkeypatch.setattr(device, "_has_room", has_room)
    with pytest.raises(DeviceError, match="cannot be seen"):
        device.create(GRANULE)
    assert device.held_bytes == census.used_bytes(device.info.uuid) == 0
    device.close()


@pytest.mark.parametrize("limit", ["address space", "mappings"])
def test_at_the_limit_of_mappings_a_growth_is_undone_whole(limit):
    uuid = f"test-mappings-{limit.split()[0]}-{os.getpid()}"

    def run() -> tuple[list[str], int, int, bool]:
        device = HostDevice(64 * MIB, uuid=uuid)
        meter = Meter()
        arena = Arena(device, 64 * MIB, meter)
        said = []
        if limit == "address space":
            with open("/proc/self/statm") as file:  # noqa: PTH123
                used = int(file.read().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (used + 16 * MIB, resource.RLIM_INFINITY))
            said.append(outcome(lambda: Arena(device, 1 * GIB, meter)))
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        else:
            with open("/proc/sys/vm/max_map_count") as file:  # noqa: PTH123
                most = int(file.read())
            filler = fill_mappings(most)
            spans = [Span(n * 4 * MIB, GRANULE) for n in range(16)]
            said.append(outcome(lambda: arena.grow(spans)))
            assert arena.mapped_bytes == 0
            assert meter.held_bytes == arena.quarantined_bytes == census.used_bytes(uuid)
            filler.close()
            # What could not even be unmapped there stayed counted, and goes now.
            arena.retry_quarantined()
        held = meter.held_bytes, census.used_bytes(uuid)
        grown = arena.grow([Span(0, GRANULE)])
        arena.close()
        return said, *held, grown

    said, counted, held, grown = in_child(run)
    assert "limit of mappings" in said[0]
    assert counted == held == 0, "what could not be mapped was given back"
    assert grown


def fill_mappings(most: int) -> mmap.mmap:
    """Cut one mapping into pages of alternating protection until the kernel allows no more."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/maps") as file:  # noqa: PTH123
        room = most - sum(1 for _ in file)
    area = mmap.mmap(-1, (room + 64) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    gc.collect()
    for page in range(1, room + 64, 2):
        if libc.mprotect(ctypes.c_void_p(address + page * mmap.PAGESIZE), mmap.PAGESIZE, 0) != 0:
            break
    return area


def test_more_than_the_maximum_of_instances_and_pools_is_refused_and_mends_itself(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    twin = Ledger.open(tmp_path / "kv", spec())
    instances = [twin.register(f"i{n}", explicit=True) for n in range(w.MAX_INSTANCES)]
    for explicit in (True, False):
        with pytest.raises(LedgerError, match="full: 64 instances are live; end some"):
            ledger.register("one-more", explicit=explicit)

    def pool(of: Ledger, n: int):
        return of.enroll(
            instances[n % w.MAX_INSTANCES],
            pool_name="kv",
            rank=n,
            blocks_total=1,
            block_bytes=1,
            sampler=lambda: TOTAL,
        )

    pools = [pool(twin, n) for n in range(w.MAX_POOLS)]
    with pytest.raises(LedgerError, match="full: 256 pools are live"):
        pool(ledger, 0)
    # Full to the last record it works as ever.
    assert pools[-1].grant(TOTAL) == Granted(TOTAL)
    assert len(ledger.snapshot().instances) == w.MAX_INSTANCES
    twin.close()  # all of them die at once
    instance, account = enroll(ledger, "after")
    assert [view.name for view in ledger.snapshot().instances] == [instance.name]
    assert account.sample()
    assert account.grant(TOTAL) == Granted(TOTAL)
    ledger.close()


def test_a_device_without_memfd_says_what_is_needed(monkeypatch):
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(DeviceError, match="memfd_create"):
        HostDevice(64 * MIB, uuid="test-no-memfd")
