"""The GPU's device against a stand-in for the bindings: which calls, in which order, how large."""

import os
import sys
import types
from pathlib import Path

import pytest

from fake_cuda import RDMA, VMM, CUresult, FakeDriver
from kvtide.device import open_device
from kvtide.device.cuda import CudaDevice
from kvtide.device.driver import process_bytes
from kvtide.errors import DeviceError
from kvtide.memory import Arena, Span
from kvtide.units import GIB, MIB
from memory_invariants import CountingMeter

LEGACY = ("stream", 1)
UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


@pytest.fixture
def device(driver):
    opened = CudaDevice(1)
    driver.calls.clear()
    yield opened
    driver.fail.clear()
    assert driver.contexts == []
    for handle in tuple(driver.handles):
        opened._created.discard(handle)
    opened._reserved.clear()
    opened.close()


def test_opening_checks_first_and_retains_the_primary_context(driver):
    device = open_device("cuda:1", host_total_bytes=0)
    info = device.info
    assert (info.uuid, info.backend, info.name) == (f"GPU-{UUID}", "cuda", "NVIDIA H200")
    assert (info.total_bytes, info.granularity_bytes) == (4 * GIB, 2 * MIB)
    assert not info.creates_zeros
    assert device.ordinal == 1
    assert device.rdma_capable
    names = driver.names()
    assert names[0] == "cuInit"
    assert names.index("cuDevicePrimaryCtxRetain") > names.index("cuMemGetAllocationGranularity")
    assert ("cuDevicePrimaryCtxRetain", "device 1") in driver.calls
    device.close()
    assert driver.names()[-1] == "cuDevicePrimaryCtxRelease"
    with pytest.raises(DeviceError, match="closed"):
        device.create(2 * MIB)


def test_a_slice_is_known_by_its_own_uuid(driver, monkeypatch):
    driver.name = b"NVIDIA H200 MIG 1g.18gb\0"
    older = types.SimpleNamespace(bytes=bytes(16))
    monkeypatch.setattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid, raising=False)
    monkeypatch.setattr(driver, "cuDeviceGetUuid", lambda device: (CUresult(0), older))
    device = CudaDevice(0)
    assert device.info.uuid == f"MIG-{UUID}"
    device.close()


def test_rdma_is_asked_for_only_where_it_is(driver):
    driver.attributes[RDMA] = 0
    device = CudaDevice(0)
    assert not device.rdma_capable
    device.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attributes": {VMM: 0, RDMA: 0}}, "no virtual memory management"),
        ({"granularity_bytes": 4 * MIB}, "handles of 4194304 bytes"),
        ({"fail": {"cuInit": CUresult.CUDA_ERROR_INVALID_VALUE}}, "cuInit failed.*what went wrong"),
    ],
)
def test_a_device_that_lacks_something_is_refused_before_a_context(driver, change, words):
    for name, value in change.items():
        setattr(driver, name, value)
    with pytest.raises(DeviceError, match=words):
        CudaDevice(0)
    assert "cuDevicePrimaryCtxRetain" not in driver.names()


def test_a_device_that_is_not_there_is_refused(driver):
    with pytest.raises(DeviceError, match="no CUDA device 2: this process sees 2"):
        CudaDevice(2)


def test_missing_bindings_and_drivers_are_told(monkeypatch, driver):
    def no_library(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(driver, "cuInit", no_library)
    with pytest.raises(DeviceError, match=r"dlopen libcuda.*is this a machine with an NVIDIA GPU"):
        CudaDevice(0)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceError, match=r"pip install 'kvtide\[cuda\]'"):
        CudaDevice(0)


def test_the_verbs_are_these_calls(driver, device):
    address = device.reserve(64 * MIB)
    handle = device.create(8 * MIB)
    device.map(address + 2 * MIB, handle)
    device.unmap(address + 2 * MIB, handle)
    device.release(handle)
    device.unreserve(address, 64 * MIB)
    properties, access = device._properties, device._access
    assert properties.location == types.SimpleNamespace(type="device", id=1)
    assert (properties.type, properties.allocFlags.gpuDirectRDMACapable) == ("pinned", 1)
    assert (access.location, access.flags) == (properties.location, "rw")
    assert driver.calls == [
        ("cuMemAddressReserve", 64 * MIB, 2 * MIB, 0, 0),
        ("cuMemCreate", 8 * MIB, properties, 0),
        ("cuMemMap", address + 2 * MIB, 8 * MIB, 0, handle.token, 0),
        ("cuMemSetAccess", address + 2 * MIB, 8 * MIB, [access], 1),
        ("cuMemUnmap", address + 2 * MIB, 8 * MIB),
        ("cuMemRelease", handle.token),
        ("cuMemAddressFree", address, 64 * MIB),
    ]


def test_a_full_device_answers_none_and_other_failures_are_errors(driver, device):
    assert device.create(8 * GIB) is None
    driver.fail["cuMemCreate"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match=r"cuMemCreate failed: CUDA_ERROR_INVALID_VALUE"):
        device.create(2 * MIB)


def test_a_mapping_without_access_is_undone(driver, device):
    handle = device.create(2 * MIB)
    driver.fail["cuMemSetAccess"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="cuMemSetAccess"):
        device.map(1 << 40, handle)
    assert driver.mapped == {}
    device.release(handle)


def test_a_mapping_that_cannot_be_undone_keeps_its_memory_counted(driver, device):
    handle = device.create(2 * MIB)
    driver.fail.update(dict.fromkeys(("cuMemSetAccess", "cuMemUnmap"), CUresult(1)))
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        device.map(1 << 40, handle)
    with pytest.raises(DeviceError, match="still mapped"):
        device.release(handle)
    assert driver.used_bytes == 2 * MIB


def test_work_is_queued_on_the_engines_stream_with_the_context_current(driver, device):
    device.zero([(1 << 40, 4 * MIB)])
    device.set_stream(77)
    device.copy(3 << 40, 1 << 40, 2 * MIB)
    device.set_stream(0)
    device.fence()
    assert [call for call in driver.calls if not call[0].startswith("cuCtx")][:2] == [
        ("cuMemsetD8Async", 1 << 40, 0, 4 * MIB, LEGACY),
        ("cuMemcpyDtoDAsync", 3 << 40, 1 << 40, 2 * MIB, ("stream", 77)),
    ]
    assert driver.calls[-2][0] == "cuEventRecord"
    assert driver.calls[-2][2] == LEGACY


def test_a_failure_leaves_the_context_as_it_was(driver, device):
    driver.fail["cuMemsetD8Async"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceError, match="cuMemsetD8Async"):
        device.zero([(1 << 40, 2 * MIB)])
    assert driver.contexts == []


def test_a_fence_asks_until_it_has_passed_and_its_event_is_used_again(driver, device):
    fence = device.fence()
    assert ("cuEventCreate", 3) in driver.calls
    assert not fence.passed()
    driver.ready = True
    assert fence.passed()
    asked = driver.names().count("cuEventQuery")
    assert fence.passed()
    fence.wait()
    assert driver.names().count("cuEventQuery") == asked
    assert "cuEventSynchronize" not in driver.names()
    second = device.fence()
    second.wait()
    assert driver.names().count("cuEventSynchronize") == 1
    del fence, second
    device.fence()
    assert driver.names().count("cuEventCreate") == 2


def test_free_bytes_are_the_drivers(driver, device):
    handle = device.create(16 * MIB)
    assert device.free_bytes() == 4 * GIB - 16 * MIB
    device.release(handle)


def test_an_arena_zeroes_each_contiguous_run_once(driver, device):
    arena = Arena(device, GIB, CountingMeter())
    spans = [Span(at * MIB, 2 * MIB) for at in (0, 2, 4, 8)]
    driver.calls.clear()
    assert arena.grow(spans)
    assert [call[1:4] for call in driver.calls if call[0] == "cuMemsetD8Async"] == [
        (arena.address, 0, 6 * MIB),
        (arena.address + 8 * MIB, 0, 2 * MIB),
    ]
    driver.calls.clear()
    assert arena.split(Span(0, 2 * MIB), [Span(0, 2 * MIB)])
    assert driver.calls == []
    arena.close()
    assert (driver.handles, driver.mapped) == ({}, {})


def test_a_split_waits_for_its_copies_before_it_gives_the_old_memory_back(driver, device):
    arena = Arena(device, GIB, CountingMeter())
    assert arena.grow([Span(0, 8 * MIB)])
    driver.calls.clear()
    assert arena.split(Span(0, 8 * MIB), [Span(4 * MIB, 2 * MIB)])
    names = [name for name in driver.names() if not name.startswith("cuCtx")]
    assert names == [
        *["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"],
        *["cuMemMap", "cuMemSetAccess", "cuMemcpyDtoDAsync", "cuEventCreate", "cuEventRecord"],
        *["cuEventSynchronize", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"],
    ]
    arena.close()
    assert (driver.handles, driver.mapped) == ({}, {})


def test_a_forked_child_is_refused(driver, device):
    pid = os.fork()
    if pid == 0:
        try:
            device.create(2 * MIB)
        except DeviceError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


class Nvml(types.ModuleType):
    """A stand-in for pynvml with two processes on one device."""

    class NVMLError(Exception): ...

    def __init__(self, *processes: tuple[int, int | None]) -> None:
        super().__init__("pynvml")
        self.processes = [types.SimpleNamespace(pid=p, usedGpuMemory=b) for p, b in processes]

    def nvmlInit(self): ...  # noqa: N802

    def nvmlShutdown(self): ...  # noqa: N802

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, device):  # noqa: N802
        return self.processes


@pytest.mark.parametrize(
    ("processes", "uuid", "told"),
    [
        ([(1, 5), (os.getpid(), 7)], "GPU-1", 7),
        ([(1, 5)], "GPU-1", None),
        ([(os.getpid(), None)], "GPU-1", None),
        ([(os.getpid(), 7)], "GPU-2", None),
    ],
)
def test_own_bytes_are_nvmls_if_it_knows_this_process(monkeypatch, processes, uuid, told):
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr("kvtide.device.driver._FIRST_PID_NAMESPACE", namespace)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(*processes))
    assert process_bytes(uuid) == told


def test_own_bytes_are_unknown_where_pids_may_be_strangers(monkeypatch):
    monkeypatch.setattr("kvtide.device.driver._FIRST_PID_NAMESPACE", -1)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((os.getpid(), 7)))
    assert process_bytes("GPU-1") is None
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert process_bytes("GPU-1") is None
