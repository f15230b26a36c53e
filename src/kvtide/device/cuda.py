"""A GPU, or a MIG slice of one, through the CUDA driver's virtual memory management."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtide.device.base import DeviceInfo, Handle
from kvtide.device.driver import Driver, process_bytes
from kvtide.device.visible import describe
from kvtide.errors import DeviceError
from kvtide.units import MIB

__all__ = ["CudaDevice", "CudaFence"]

_GRANULARITY_BYTES = 2 * MIB
_LEGACY_STREAM = 1


class CudaFence:
    """An event recorded on the stream of a device."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device = device
        self._event = event
        self._passed = False

    def passed(self) -> bool:
        """Whether all work queued before the fence is done. Never waits."""
        if not self._passed:
            self._passed = self._device._event_passed(self._event)
        return self._passed

    def wait(self) -> None:
        """Wait until all work queued before the fence is done; other threads run meanwhile."""
        if not self._passed:
            self._device._event_wait(self._event)
            self._passed = True

    def __del__(self) -> None:
        # Recording an event again is allowed at any time, so no call of the driver is needed here.
        self._device._spare_events.append(self._event)


class CudaDevice:
    """Handles are physical memory of one GPU, mapped by this process alone.

    The primary context is used, the one that torch uses too. Any thread may call; those that
    queue work (`zero`, `copy`, `fence`) make the context current meanwhile and use the stream of
    `set_stream`, the legacy default stream before that.

    Parameters
    ----------
    ordinal
        The device's number among those that this process sees, as torch counts them.

    Raises
    ------
    DeviceError
        There is no such device or driver, or the device cannot map memory at addresses of choice.
    """

    def __init__(self, ordinal: int) -> None:
        self._driver = Driver()
        self._call, self._api = self._driver.call, self._driver.api
        driver = self._api
        self._ordinal = ordinal
        count = self._call(driver.cuDeviceGetCount)
        if not 0 <= ordinal < count:
            raise DeviceError(
                f"there is no CUDA device {ordinal}: this process sees {count} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})"
            )
        self._device = self._call(driver.cuDeviceGet, ordinal)
        name = self._call(driver.cuDeviceGetName, 256, self._device).split(b"\0")[0].decode()
        if not self._driver.has(self._device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise DeviceError(
                f"{name} has no virtual memory management (a vGPU profile may lack it), which "
                "kvtide needs: use another device or profile"
            )
        self._properties = self._allocation_properties()
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        least = self._call(driver.cuMemGetAllocationGranularity, self._properties, minimum)
        if _GRANULARITY_BYTES % least:
            raise DeviceError(f"{name} has handles of {least} bytes; kvtide needs them of 2 MiB")
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, self._device)
        self._stream = driver.CUstream(_LEGACY_STREAM)
        self._events: list[Any] = []
        self._spare_events: list[Any] = []
        self._reserved: set[int] = set()
        self._created: set[int] = set()
        self._half_mapped: set[int] = set()
        self._closed = False
        self._info = describe(self._driver, self._device)
        _open_devices.add(self)

    @property
    def info(self) -> DeviceInfo:
        """What this device is."""
        return self._info

    @property
    def ordinal(self) -> int:
        """The device's number among those that this process sees."""
        return self._ordinal

    @property
    def rdma_capable(self) -> bool:
        """Whether handles can be registered for RDMA."""
        return bool(self._properties.allocFlags.gpuDirectRDMACapable)

    def set_stream(self, stream: int) -> None:
        """Queue all further work on this stream (torch's `stream.cuda_stream`)."""
        # torch's default stream is 0, which the bindings may take for the per-thread one.
        self._stream = self._api.CUstream(stream or _LEGACY_STREAM)

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses that fault on every access."""
        self._check_open()
        driver = self._api
        address = int(self._call(driver.cuMemAddressReserve, size_bytes, _GRANULARITY_BYTES, 0, 0))
        self._reserved.add(address)
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Give back a whole reservation in which nothing is mapped."""
        self._check_open()
        assert address in self._reserved, "not a reservation of this device"
        self._call(self._api.cuMemAddressFree, address, size_bytes)
        self._reserved.discard(address)

    def create(self, size_bytes: int) -> Handle | None:
        """Take physical memory, or None when there is not so much. It holds garbage."""
        self._check_open()
        driver = self._api
        status, handle = driver.cuMemCreate(size_bytes, self._properties, 0)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return None
        self._driver.check("cuMemCreate", status)
        self._created.add(int(handle))
        return Handle(size_bytes, int(handle))

    def map(self, address: int, handle: Handle) -> None:
        """Put a handle at reserved addresses, readable and writable. All or nothing."""
        self._check_open()
        driver, size_bytes = self._api, handle.size_bytes
        self._call(driver.cuMemMap, address, size_bytes, 0, handle.token, 0)
        try:
            self._call(driver.cuMemSetAccess, address, size_bytes, [self._access], 1)
        except DeviceError:
            self._half_mapped.add(handle.token)
            self._call(driver.cuMemUnmap, address, size_bytes)
            self._half_mapped.discard(handle.token)
            raise

    def unmap(self, address: int, handle: Handle) -> None:
        """Take the whole handle from these addresses, which fault again from then on."""
        self._check_open()
        self._call(self._api.cuMemUnmap, address, handle.size_bytes)

    def release(self, handle: Handle) -> None:
        """Give physical memory back; it must not be mapped any more."""
        self._check_open()
        if handle.token in self._half_mapped:
            # The driver would agree, and keep the memory for as long as the mapping stays.
            raise DeviceError(f"{handle.size_bytes} bytes are still mapped: a mapping failed twice")
        self._call(self._api.cuMemRelease, handle.token)
        self._created.discard(handle.token)

    def zero(self, runs: Sequence[tuple[int, int]]) -> None:
        """Fill mapped memory with zeros, in the order of the stream."""
        memset, stream = self._api.cuMemsetD8Async, self._stream
        with self._current():
            for address, size_bytes in runs:
                (status,) = memset(address, 0, size_bytes, stream)
                self._driver.check("cuMemsetD8Async", status)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy mapped memory, in the order of the stream."""
        driver = self._api
        with self._current():
            self._call(driver.cuMemcpyDtoDAsync, destination, source, size_bytes, self._stream)

    def fence(self) -> CudaFence:
        """Mark this point of the stream."""
        driver = self._api
        with self._current():
            event = self._spare_events.pop() if self._spare_events else self._new_event()
            self._call(driver.cuEventRecord, event, self._stream)
        return CudaFence(self, event)

    def free_bytes(self) -> int:
        """Physical memory nobody holds now, as the driver counts it."""
        with self._current():
            free_bytes, _ = self._call(self._api.cuMemGetInfo)
        return int(free_bytes)

    def own_bytes(self) -> int | None:
        """All memory of this process on the device, context included; None where nothing tells."""
        return process_bytes(self._info.uuid)

    def close(self) -> None:
        """Let go of the context. Everything must have been released and unreserved before."""
        if self._closed:
            return
        assert not self._created, f"{len(self._created)} handles are not released"
        assert not self._reserved, f"{len(self._reserved)} reservations are still there"
        with self._current():
            while self._events:
                self._call(self._api.cuEventDestroy, self._events.pop())
        self._call(self._api.cuDevicePrimaryCtxRelease, self._device)
        self._closed = True
        _open_devices.discard(self)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context current; an engine with several devices may have another one current."""
        self._check_open()
        self._call(self._api.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            self._call(self._api.cuCtxPopCurrent)

    def _new_event(self) -> Any:
        flags = self._api.CUevent_flags
        # Blocking: a thread that waits must not spin.
        chosen = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        event = self._call(self._api.cuEventCreate, chosen)
        self._events.append(event)
        return event

    def _event_passed(self, event: Any) -> bool:
        (status,) = self._api.cuEventQuery(event)
        if status == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._driver.check("cuEventQuery", status)
        return True

    def _event_wait(self, event: Any) -> None:
        self._call(self._api.cuEventSynchronize, event)

    def _allocation_properties(self) -> Any:
        driver = self._api
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._ordinal
        if self._driver.has(self._device, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            properties.allocFlags.gpuDirectRDMACapable = 1
        return properties

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(
                "this CUDA device is closed, or was opened before a fork: a forked child cannot "
                "use CUDA, so start worker processes by spawn"
            )


_open_devices: set[CudaDevice] = set()


def _after_in_child() -> None:
    for device in _open_devices:
        device._closed = True
    _open_devices.clear()


os.register_at_fork(after_in_child=_after_in_child)
