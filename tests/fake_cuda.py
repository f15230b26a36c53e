"""A stand-in for `cuda.bindings.driver`: keeps the books of a GPU and records every call."""

import enum
import types
from collections.abc import Callable
from typing import Any

from kvtide.units import GIB, MIB

__all__ = ["FakeDriver"]

VMM = "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"
RDMA = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"


# Calls that answer a status and nothing else.
PLAIN = frozenset(
    {
        "cuInit",
        "cuDevicePrimaryCtxRelease",
        "cuCtxPushCurrent",
        "cuMemAddressFree",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemsetD8Async",
        "cuMemcpyDtoDAsync",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuEventDestroy",
    }
)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600


CUdevice_attribute = enum.IntEnum("CUdevice_attribute", [VMM, RDMA])


class FakeDriver(types.ModuleType):
    """Put it into `sys.modules` under the name of the bindings.

    `fail[call]` is the status that a call answers; `calls` are the names and arguments of all.
    """

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="rw")
    CUmemAllocationGranularity_flags = types.SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="min")
    CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)
    CUstream = staticmethod(lambda number: ("stream", number))
    CUmemAccessDesc = types.SimpleNamespace

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, CUresult] = {}
        self.attributes = {VMM: 1, RDMA: 1}
        self.name = b"NVIDIA H200\0\0"
        self.granularity_bytes = 2 * MIB
        self.total_bytes = 4 * GIB
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.contexts: list[str] = []
        self.ready = False
        self._next = 0
        for name in vars(type(self)):
            if name.startswith("_cu"):
                setattr(self, name[1:], self._recorded(name[1:], getattr(self, name)))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def recorded(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            status = self.fail.get(name, CUresult.CUDA_SUCCESS)
            result = function(*arguments) if status == CUresult.CUDA_SUCCESS else None
            if isinstance(result, CUresult):
                status, result = result, None
            if name in PLAIN:
                return (status,)
            return (status, *(result if isinstance(result, tuple) else (result,)))

        recorded.__name__ = name
        return recorded

    @staticmethod
    def CUmemAllocationProp() -> types.SimpleNamespace:  # noqa: N802
        return types.SimpleNamespace(
            type=None,
            location=types.SimpleNamespace(),
            allocFlags=types.SimpleNamespace(gpuDirectRDMACapable=0),
        )

    def _number(self) -> int:
        self._next += 1
        return self._next

    @property
    def used_bytes(self) -> int:
        return sum(self.handles.values())

    def _cuInit(self, flags): ...  # noqa: N802

    def _cuGetErrorName(self, status):  # noqa: N802
        return status.name.encode()

    def _cuGetErrorString(self, status):  # noqa: N802
        return b"what went wrong"

    def _cuDeviceGetCount(self):  # noqa: N802
        return 2

    def _cuDeviceGet(self, ordinal):  # noqa: N802
        return f"device {ordinal}"

    def _cuDeviceGetName(self, length, device):  # noqa: N802
        return self.name

    def _cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return self.attributes[attribute.name]

    def _cuDeviceGetUuid(self, device):  # noqa: N802
        return types.SimpleNamespace(bytes=bytes(range(16)))

    def _cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return "primary context"

    def _cuDevicePrimaryCtxRelease(self, device): ...  # noqa: N802

    def _cuCtxPushCurrent(self, context):  # noqa: N802
        self.contexts.append(context)

    def _cuCtxPopCurrent(self):  # noqa: N802
        return self.contexts.pop()

    def _cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        return self.granularity_bytes

    def _cuMemGetInfo(self):  # noqa: N802
        assert self.contexts == ["primary context"]
        return self.total_bytes - self.used_bytes, self.total_bytes

    def _cuDeviceTotalMem(self, device):  # noqa: N802
        return self.total_bytes

    def _cuMemAddressReserve(self, size, alignment, address, flags):  # noqa: N802
        return self._number() << 40

    def _cuMemAddressFree(self, address, size): ...  # noqa: N802

    def _cuMemCreate(self, size, properties, flags):  # noqa: N802
        if self.used_bytes + size > self.total_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        number = self._number()
        self.handles[number] = size
        return number

    def _cuMemMap(self, address, size, offset, handle, flags):  # noqa: N802
        assert self.handles[handle] == size
        assert address not in self.mapped
        self.mapped[address] = size

    def _cuMemSetAccess(self, address, size, descriptions, count):  # noqa: N802
        assert self.mapped[address] == size
        assert len(descriptions) == count

    def _cuMemUnmap(self, address, size):  # noqa: N802
        assert self.mapped.pop(address) == size

    def _cuMemRelease(self, handle):  # noqa: N802
        del self.handles[handle]

    def _cuMemsetD8Async(self, address, value, size, stream):  # noqa: N802
        assert self.contexts == ["primary context"]

    def _cuMemcpyDtoDAsync(self, to, source, size, stream):  # noqa: N802
        assert self.contexts == ["primary context"]

    def _cuEventCreate(self, flags):  # noqa: N802
        return f"event {self._number()}"

    def _cuEventRecord(self, event, stream):  # noqa: N802
        assert self.contexts == ["primary context"]

    def _cuEventQuery(self, event):  # noqa: N802
        return None if self.ready else CUresult.CUDA_ERROR_NOT_READY

    def _cuEventSynchronize(self, event): ...  # noqa: N802

    def _cuEventDestroy(self, event): ...  # noqa: N802
