"""Choose and open a device by what a person writes: `host`, `cuda` or `cuda:1`."""

from __future__ import annotations

import re

from kvtide.device.base import Device
from kvtide.device.host import HOST_UUID, HostDevice
from kvtide.errors import DeviceError

__all__ = ["open_device"]

_SPEC = re.compile(r"host|cuda(?::(\d{1,3}))?", re.ASCII)


def open_device(spec: str, *, host_total_bytes: int, host_uuid: str = HOST_UUID) -> Device:
    """Open a device in this process.

    Parameters
    ----------
    spec
        `host`, or `cuda:N` for the Nth device that this process sees (`cuda` is `cuda:0`).
    host_total_bytes
        Size of the host device; ignored for a GPU.
    host_uuid
        Which host device; a machine may have several, each with memory of its own.

    Raises
    ------
    DeviceError
        There is no such device, or it lacks what kvtide needs.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise DeviceError(f"{spec!r} is no device; write host, cuda or cuda:N")
    if spec == "host":
        return HostDevice(host_total_bytes, uuid=host_uuid)
    # Only here: the driver's bindings are an extra, and slow to import.
    from kvtide.device.cuda import CudaDevice

    return CudaDevice(int(match[1] or 0))
