"""vLLM's start beside neighbours: the device as if this process were alone on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvtide.device.driver import process_bytes
from kvtide.engines.own_bytes import CONTEXT_BYTES

__all__ = ["alone_on_device", "own_bytes"]


@contextmanager
def alone_on_device() -> Iterator[None]:
    """Have torch answer "total minus this process's own memory" to how much is free.

    vLLM holds the free memory against its share of the total, and asserts that it does not grow
    while it profiles: both would depend on what neighbours hold, take and free meanwhile.
    """
    original = torch.accelerator.get_memory_info

    def get_memory_info(device: Any = None) -> tuple[int, int]:
        _, total_bytes = original(device) if device is not None else original()
        return total_bytes - own_bytes(device), total_bytes

    torch.accelerator.get_memory_info = get_memory_info
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = original


def own_bytes(device: Any = None) -> int:
    """What this process holds of a device in all, in bytes."""
    index = torch.device(device).index if device is not None else None
    if index is None:
        index = torch.accelerator.current_device_index()
    # By torch's own books where the driver cannot tell whose memory is whose: the same in any
    # neighbourhood, which matters more here than the last MiB.
    properties = torch.cuda.get_device_properties(index)
    told = process_bytes(f"GPU-{properties.uuid}")
    if told is not None:
        return told
    return int(torch.accelerator.memory_reserved(index)) + CONTEXT_BYTES
