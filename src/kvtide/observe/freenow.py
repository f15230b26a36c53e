"""How much of a device is free now, by its kernel or driver; without a context on it."""

from __future__ import annotations

from kvtide.device.census import used_bytes
from kvtide.ledger import DeviceSpec

__all__ = ["free_now_bytes"]


def free_now_bytes(spec: DeviceSpec) -> int | None:
    """Bytes nobody holds now; None where that cannot be known (no NVML here, or a MIG slice)."""
    if spec.backend == "host":
        return max(0, spec.total_bytes - used_bytes(spec.uuid))
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(spec.uuid)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:
        return None
