"""Which devices an SGLang server will use, and each rank's own: found without a CUDA context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtide.device import open_device
from kvtide.device.base import Device, DeviceInfo
from kvtide.settings import Settings

__all__ = ["devices_of", "open_rank_device", "order_with"]


def devices_of(arguments: Mapping[str, Any], settings: Settings) -> list[DeviceInfo]:
    """The devices of a server's ranks, each once."""
    if arguments["device"] == "cpu":
        names = settings.host_device[: arguments["tp_size"]]
        return [_open_host(name, settings).info for name in names]
    from kvtide.device.visible import describe_visible

    visible = describe_visible()
    first, step = arguments["base_gpu_id"], arguments["gpu_id_step"]
    return [visible[first + rank * step] for rank in range(arguments["tp_size"])]


def open_rank_device(device: str, gpu_id: int, rank: int, settings: Settings) -> Device:
    """The device of a rank, in its process."""
    if device == "cpu":
        return _open_host(settings.host_device[rank % len(settings.host_device)], settings)
    return open_device(f"cuda:{gpu_id}", host_total_bytes=0)


def order_with(device: Device, stream: Any) -> None:
    """Order a GPU's own work (zeroing, fences) with what runs on a stream; nothing on the host."""
    if device.info.backend == "host":
        return
    from kvtide.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    device.set_stream(stream.cuda_stream)


def _open_host(name: str, settings: Settings) -> Device:
    return open_device("host", host_total_bytes=settings.host_memory, host_uuid=name)
