"""Which GPUs there are, and whether each can do what kvtide needs of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtide.device.driver import Driver
from kvtide.device.visible import describe
from kvtide.errors import DeviceError
from kvtide.observe.findings import Finding, note, ok, wrong
from kvtide.units import format_size

__all__ = ["check_gpus"]

_ABOUT: Final = "cuda devices"
_CONTROL: Final = Path("/dev/nvidiactl")


def check_gpus(control: Path = _CONTROL) -> Iterator[Finding]:
    """Ask the driver, without a context and without taking memory of a GPU."""
    if not control.exists():
        yield note(_ABOUT, "no NVIDIA driver here")
        return
    try:
        driver = Driver()
        count = driver.call(driver.api.cuDeviceGetCount)
        found = [_check_gpu(driver, driver.call(driver.api.cuDeviceGet, i)) for i in range(count)]
    except DeviceError as error:
        yield note(_ABOUT, str(error), "GPUs stay unused until this is mended")
        return
    yield from found or [note(_ABOUT, "none visible", "look at CUDA_VISIBLE_DEVICES")]


def _check_gpu(driver: Driver, device: Any) -> Finding:
    info = describe(driver, device)
    about, what = f"gpu {info.uuid}", f"{info.name} of {format_size(info.total_bytes)}"
    if not driver.has(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        return wrong(
            about,
            f"{what} cannot map memory at addresses of choice (a vGPU profile may lack it)",
            "use another device or profile",
        )
    rdma = driver.has(device, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
    return ok(about, f"{what} maps memory elastically, {'also' if rdma else 'not'} for RDMA")
