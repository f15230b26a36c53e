"""Physical memory: reserve, create, map, unmap, release, on a GPU or on the host."""

from kvtide.device.base import Device, DeviceInfo, Fence, Handle
from kvtide.device.opening import open_device

__all__ = ["Device", "DeviceInfo", "Fence", "Handle", "open_device"]
