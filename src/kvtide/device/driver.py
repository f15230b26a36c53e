"""The CUDA driver's calls as functions that return their value or raise with its reason."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtide.errors import DeviceError

__all__ = ["Driver", "process_bytes"]

# What the kernel gives the first of all pid namespaces (PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


class Driver:
    """The driver, started. `api` is the module of the bindings, for its types and functions.

    Raises
    ------
    DeviceError
        The bindings or the driver are missing.
    """

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceError(
                f"a GPU needs the CUDA bindings ({error}): pip install 'kvtide[cuda]'"
            ) from error
        self._success = self.api.CUresult.CUDA_SUCCESS
        try:
            self.call(self.api.cuInit, 0)
        except RuntimeError as error:
            # So the bindings say that they did not find the driver's library.
            raise DeviceError(
                f"the CUDA driver cannot be loaded ({error}): is this a machine with an NVIDIA "
                "GPU and driver, and does the container see them?"
            ) from error

    def call(self, function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
        """Call a function of the driver; its value, values, or None.

        Raises
        ------
        DeviceError
            The driver reports an error; it names the call and has the driver's own words.
        """
        status, *values = function(*arguments)
        self.check(function.__name__, status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def has(self, device: Any, attribute: str) -> bool:
        """Whether a device has what an attribute of the driver's names, without its prefix."""
        which = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return bool(self.call(self.api.cuDeviceGetAttribute, which, device))

    def check(self, name: str, status: Any) -> None:
        """Raise if a call of this name did not succeed."""
        if status != self._success:
            raise DeviceError(f"{name} failed: {self._explain(status)}")

    def _explain(self, status: Any) -> str:
        _, name = self.api.cuGetErrorName(status)
        _, words = self.api.cuGetErrorString(status)
        if name is None or words is None:
            return f"unknown error {int(status)}"
        return f"{name.decode()} ({words.decode()})"


def process_bytes(uuid: str) -> int | None:
    """This process's own memory on a GPU as NVML counts it; None where it cannot tell.

    It cannot without its library, and in a pid namespace other than the first one, where the pids
    that it reports may be those of strangers.
    """
    if Path("/proc/self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    used = [one.usedGpuMemory for one in processes if one.pid == os.getpid()]
    return None if not used or None in used else sum(used)
