"""Which devices an engine will use, and each worker's own: found without a CUDA context."""

from __future__ import annotations

from typing import Any

from kvtide.device import open_device
from kvtide.device.base import Device, DeviceInfo
from kvtide.settings import Settings

__all__ = ["devices_of", "open_worker_device"]


def devices_of(config: Any, settings: Settings) -> list[DeviceInfo]:
    """The devices of an engine's local ranks."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        names = settings.host_device[: config.parallel_config.local_world_size]
        return [_open_host(settings, name).info for name in names]
    from kvtide.device.visible import describe_visible

    return describe_visible()[: config.parallel_config.local_world_size]


def open_worker_device(worker: Any, settings: Settings) -> Device:
    """The device of a worker, in its process."""
    if worker.device.type == "cpu":
        names = settings.host_device
        return _open_host(settings, names[worker.rank % len(names)])
    return open_device(f"cuda:{worker.device.index or 0}", host_total_bytes=0)


def _open_host(settings: Settings, name: str) -> Device:
    return open_device("host", host_total_bytes=settings.host_memory, host_uuid=name)
