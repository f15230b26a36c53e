"""The host device, held against the kernel's own figures."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtide.device import Handle, open_device
from kvtide.device.base import Device
from kvtide.device.census import holdings, used_bytes
from kvtide.device.host import HostDevice
from kvtide.errors import DeviceError
from kvtide.units import GIB, MIB

TOTAL = 64 * MIB
READY = "ready\n"


def anonymous_uuid() -> str:
    return f"test-{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture
def device():
    opened = HostDevice(TOTAL, uuid=anonymous_uuid())
    yield opened
    opened.close()
    assert used_bytes(opened.info.uuid) == 0


def create(device: Device, size_bytes: int) -> Handle:
    handle = device.create(size_bytes)
    assert handle is not None
    return handle


def resident_bytes(address: int) -> int:
    """Rss of the mapping that begins at an address, as the kernel's smaps has it."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(one.split()[1]) * 1024 for one in lines if one.startswith("Rss:"))
    raise AssertionError(f"no mapping at {address:#x}")


def run_child(body: str, *arguments: str) -> subprocess.Popen:
    source = (
        "import sys, os, time\n"
        "from kvtide.device.host import HostDevice\n"
        "from kvtide.units import MIB\n"
        "device = HostDevice(int(sys.argv[2]), uuid=sys.argv[1])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", source + body, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def in_fork(body) -> int:
    """Run something in a forked child; its wait status."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        try:
            body()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitpid(pid, 0)[1]


def test_an_opened_device_says_what_it_is_and_holds_nothing(device):
    info = device.info
    assert (info.backend, info.total_bytes, info.granularity_bytes) == ("host", TOTAL, 2 * MIB)
    assert info.creates_zeros
    assert device.free_bytes() == TOTAL
    assert [held.size_bytes for held in holdings(info.uuid)] == [0]


def test_create_takes_memory_from_the_kernel_and_release_gives_it_back(device):
    handles = [create(device, size * MIB) for size in (2, 4, 16)]
    assert device.free_bytes() == TOTAL - 22 * MIB
    assert used_bytes(device.info.uuid) == 22 * MIB
    device.release(handles[1])
    assert device.free_bytes() == TOTAL - 18 * MIB
    device.release(handles[0])
    device.release(handles[2])
    assert device.free_bytes() == TOTAL


def test_released_memory_has_left_the_process(device):
    address = device.reserve(32 * MIB)
    handle = create(device, 16 * MIB)
    device.map(address, handle)
    ctypes.memset(address, 7, 16 * MIB)
    assert resident_bytes(address) == 16 * MIB
    device.unmap(address, handle)
    assert resident_bytes(address) == 0
    device.release(handle)
    assert used_bytes(device.info.uuid) == 0
    device.unreserve(address, 32 * MIB)


def test_a_full_device_answers_none_and_keeps_what_it_had(device):
    handles = [create(device, 16 * MIB) for _ in range(3)]
    assert device.create(32 * MIB) is None
    assert device.free_bytes() == 16 * MIB
    last = create(device, 16 * MIB)
    assert device.create(2 * MIB) is None
    for handle in [*handles, last]:
        device.release(handle)


def test_one_descriptor_however_many_handles(device):
    before = len(list(Path("/proc/self/fd").iterdir()))
    handles = [create(device, 2 * MIB) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for handle in handles:
        device.release(handle)


def test_contents_stay_with_the_handle_and_a_new_one_is_zero(device):
    address = device.reserve(8 * MIB)
    handle = create(device, 2 * MIB)
    device.map(address, handle)
    ctypes.memset(address, 5, 2 * MIB)
    device.map(address + 4 * MIB, handle)
    assert ctypes.string_at(address + 4 * MIB, 2 * MIB) == b"\x05" * (2 * MIB)
    device.copy(address, address + 4 * MIB, MIB)
    device.zero([(address + MIB, MIB)])
    device.fence().wait()
    assert device.fence().passed()
    assert ctypes.string_at(address, 2 * MIB) == b"\x05" * MIB + b"\x00" * MIB
    for at in (address, address + 4 * MIB):
        device.unmap(at, handle)
    device.release(handle)
    fresh = create(device, 2 * MIB)
    device.map(address, fresh)
    assert ctypes.string_at(address, 2 * MIB) == bytes(2 * MIB)
    device.unmap(address, fresh)
    device.release(fresh)
    device.unreserve(address, 8 * MIB)


@pytest.mark.parametrize("when", ["never mapped", "unmapped"])
def test_a_stray_access_is_a_crash(device, when):
    address = device.reserve(2 * MIB)
    if when == "unmapped":
        handle = create(device, 2 * MIB)
        device.map(address, handle)
        ctypes.memset(address, 1, 2 * MIB)
        device.unmap(address, handle)
        device.release(handle)
    for access in (
        lambda: ctypes.string_at(address, 1),
        lambda: ctypes.memset(address + 2 * MIB - 1, 1, 1),
    ):
        assert os.WTERMSIG(in_fork(access)) == signal.SIGSEGV
    device.unreserve(address, 2 * MIB)


def test_a_forked_child_keeps_nothing(device):
    address = device.reserve(4 * MIB)
    handle = create(device, 2 * MIB)
    device.map(address, handle)
    assert os.WTERMSIG(in_fork(lambda: ctypes.string_at(address, 1))) == signal.SIGSEGV

    def look():
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [link for link in links if "kvtide" in str(link)]
        with pytest.raises(DeviceError, match="fork"):
            device.create(2 * MIB)
        with pytest.raises(DeviceError, match="fork"):
            device.release(handle)
        HostDevice(TOTAL, uuid=device.info.uuid).reserve(2 * MIB)

    assert in_fork(look) == 0
    device.unmap(address, handle)
    device.release(handle)
    device.unreserve(address, 4 * MIB)


def test_a_child_that_outlives_its_parent_does_not_keep_the_memory():
    uuid = anonymous_uuid()
    body = (
        "handle = device.create(4 * MIB)\n"
        "address = device.reserve(4 * MIB); device.map(address, handle)\n"
        # The child says so itself: only then has it let go of what it does not inherit.
        "if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(60)\n"
        "sys.stdin.read()\n"
    )
    process = run_child(body, uuid, str(TOTAL))
    orphan = int(process.stdout.readline())
    assert used_bytes(uuid) == 4 * MIB
    assert {held.pid for held in holdings(uuid)} == {process.pid}
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        stream.close()
    assert Path(f"/proc/{orphan}").exists()
    assert used_bytes(uuid) == 0
    os.kill(orphan, signal.SIGKILL)


def test_two_processes_see_each_other_and_a_killed_one_leaves_nothing(device):
    handle = create(device, 10 * MIB)
    body = (
        "handle = device.create(20 * MIB)\n"
        "print(device.free_bytes(), device.create(40 * MIB), flush=True); sys.stdin.read()\n"
    )
    process = run_child(body, device.info.uuid, str(TOTAL))
    assert process.stdout.readline() == f"{TOTAL - 30 * MIB} None\n"
    assert device.free_bytes() == TOTAL - 30 * MIB
    assert device.create(36 * MIB) is None
    assert {(held.pid, held.size_bytes) for held in holdings(device.info.uuid)} == {
        (os.getpid(), 10 * MIB),
        (process.pid, 20 * MIB),
    }
    process.kill()
    process.communicate()
    assert device.free_bytes() == TOTAL - 10 * MIB
    device.release(handle)


def test_creates_of_many_processes_at_once_never_stay_above_the_total():
    uuid = anonymous_uuid()
    body = (
        "print('ready', flush=True); sys.stdin.readline()\n"
        "got = [h for h in (device.create(2 * MIB) for _ in range(30)) if h]\n"
        "print(len(got), flush=True); sys.stdin.read()\n"
    )
    processes = [run_child(body, uuid, str(32 * MIB)) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == READY
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    got = sum(int(process.stdout.readline()) for process in processes)
    assert used_bytes(uuid) == got * 2 * MIB
    assert 0 < got <= 16
    for process in processes:
        process.communicate()
    assert used_bytes(uuid) == 0


def test_the_machine_wide_bound_is_not_trusted_where_it_misses_own_memory(device, monkeypatch):
    handle = create(device, TOTAL)
    for told in (0, 2 * MIB):
        monkeypatch.setattr("kvtide.device.libc.shmem_bound", lambda told=told: told)
        assert device.create(2 * MIB) is None
    device.release(handle)


def test_what_cannot_be_is_refused(device):
    address = device.reserve(8 * MIB)
    handle = create(device, 4 * MIB)
    with pytest.raises(DeviceError, match="not reserved"):
        device.map(address + 6 * MIB, handle)
    with pytest.raises(DeviceError, match="not reserved"):
        device.map(address + MIB, handle)
    device.map(address + 2 * MIB, handle)
    for at in (0, 4):
        with pytest.raises(DeviceError, match="mapped already"):
            device.map(address + at * MIB, handle)
    with pytest.raises(AssertionError, match="mapped"):
        device.release(handle)
    with pytest.raises(AssertionError, match="mapped"):
        device.unreserve(address, 8 * MIB)
    device.unmap(address + 2 * MIB, handle)
    with pytest.raises(AssertionError, match="not mapped"):
        device.unmap(address + 2 * MIB, handle)
    device.release(handle)
    with pytest.raises(AssertionError, match="reservation"):
        device.close()
    device.unreserve(address, 8 * MIB)
    for size_bytes in (0, -2 * MIB, MIB, 3 * MIB):
        with pytest.raises(DeviceError, match="multiple"):
            device.create(size_bytes)
    with pytest.raises(DeviceError, match=r"address|mappings"):
        device.reserve(1 << 60)
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.create(2 * MIB)


def test_a_large_reservation_costs_nothing(device):
    address = device.reserve(256 * GIB)
    assert address % (2 * MIB) == 0
    assert resident_bytes(address) == 0
    device.unreserve(address, 256 * GIB)


def test_a_machine_without_memfd_is_told_what_to_do(monkeypatch):
    def refuse(name):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(DeviceError, match=r"memfd_create.*use Linux"):
        HostDevice(TOTAL)


def test_a_device_smaller_than_a_handle_is_refused():
    with pytest.raises(DeviceError, match="KVTIDE_HOST_MEMORY"):
        HostDevice(MIB)


def test_host_devices_of_other_names_have_memory_of_their_own():
    one, other = anonymous_uuid(), anonymous_uuid() + "-other"
    first = open_device("host", host_total_bytes=TOTAL, host_uuid=one)
    second = open_device("host", host_total_bytes=TOTAL, host_uuid=other)
    handle = first.create(2 * MIB)
    assert handle is not None
    assert (first.info.uuid, second.info.uuid) == (one, other)
    assert (first.free_bytes(), second.free_bytes()) == (TOTAL - 2 * MIB, TOTAL)
    first.release(handle)


def test_open_device_chooses_by_name():
    device = open_device("host", host_total_bytes=TOTAL)
    assert (device.info.uuid, device.info.total_bytes) == ("host", TOTAL)
    device.close()
    for spec in ("gpu", "cuda:", "cuda:x", "Host", ""):
        with pytest.raises(DeviceError, match="cuda:N"):
            open_device(spec, host_total_bytes=TOTAL)
