"""What the doctor says of GPUs, by a driver that stands in."""

import sys

import pytest

from fake_cuda import RDMA, VMM, FakeDriver
from kvtide.observe.gpus import check_gpus


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    return fake


def found(tmp_path):
    return list(check_gpus(tmp_path))  # which exists, as the driver's file does


def test_no_driver_is_no_fault(tmp_path):
    (finding,) = check_gpus(tmp_path / "nvidiactl")
    assert (finding.status, finding.found) == ("note", "no NVIDIA driver here")


def test_every_gpu_is_told_with_what_it_can(driver, tmp_path):
    first, _ = found(tmp_path)
    assert first.status == "ok"
    assert first.about.startswith("gpu GPU-")
    assert first.found == "NVIDIA H200 of 4GiB maps memory elastically, also for RDMA"
    driver.attributes[RDMA] = 0
    assert found(tmp_path)[0].found.endswith("not for RDMA")
    assert not {"cuDevicePrimaryCtxRetain", "cuMemCreate"} & set(driver.names())


def test_one_without_virtual_memory_management_is_wrong(driver, tmp_path):
    driver.attributes[VMM] = 0
    assert {f.status for f in found(tmp_path)} == {"wrong"}


def test_a_driver_that_fails_is_told(driver, tmp_path):
    driver.fail["cuDeviceGetCount"] = type(driver).CUresult.CUDA_ERROR_INVALID_VALUE
    (finding,) = found(tmp_path)
    assert finding.status == "note"
    assert "what went wrong" in finding.found
