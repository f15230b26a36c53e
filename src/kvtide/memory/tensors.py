"""torch tensors over reserved addresses; the one place of the lower floors that imports torch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvtide.device.base import DeviceInfo

if TYPE_CHECKING:
    import torch

__all__ = ["tensor_over"]

_DL_CPU = 1
_DL_CUDA = 2
_DL_INT = 0


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Block(ctypes.Structure):
    """All that torch reads for as long as the tensor lives, in one piece of memory."""

    _fields_ = (
        ("managed", _DLManagedTensor),
        ("shape", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


_malloc = ctypes.CDLL(None).malloc
_malloc.restype = ctypes.c_void_p
_malloc.argtypes = (ctypes.c_size_t,)
# An own function object: ctypes.pythonapi's attributes are shared with everybody else.
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
# The capsule keeps a pointer to its name.
_CAPSULE_NAME = b"dltensor"


def tensor_over(address: int, size_bytes: int, device_info: DeviceInfo, index: int) -> torch.Tensor:
    """Make a tensor of exactly these addresses, mapped or not; nothing is read or written.

    The tensor owns nothing: the addresses must stay reserved for as long as it may be used. It may
    outlive the interpreter's other objects, since nothing of Python is called when it goes.

    Parameters
    ----------
    address, size_bytes
        A part of an arena.
    device_info
        Of the arena's device.
    index
        torch's number of the GPU; ignored on the host.

    Returns
    -------
    torch.Tensor
        int8, of shape (size_bytes,), with a storage of just that size.
    """
    import torch

    if size_bytes <= 0:
        raise ValueError(f"a tensor of {size_bytes} bytes is of no use")
    if device_info.backend == "host":
        buffer = (ctypes.c_int8 * size_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)
    return _from_dlpack(address, size_bytes, _DL_CUDA, index)


def _from_dlpack(address: int, size_bytes: int, device_type: int, index: int) -> torch.Tensor:
    import torch

    # Never freed, on purpose: torch looks at the deleter when the tensor goes, which can be after
    # the interpreter has ended; a deleter of Python's would then crash.
    block_address = _malloc(ctypes.sizeof(_Block))
    if block_address is None:
        raise MemoryError
    block = _Block.from_address(block_address)
    block.shape = size_bytes
    block.stride = 1
    block.managed.manager_ctx = None
    block.managed.deleter = None
    tensor = block.managed.dl_tensor
    tensor.data = address
    tensor.device_type = device_type
    tensor.device_id = index
    tensor.ndim = 1
    tensor.code, tensor.bits, tensor.lanes = _DL_INT, 8, 1
    tensor.shape = block_address + _Block.shape.offset
    tensor.strides = block_address + _Block.stride.offset
    tensor.byte_offset = 0
    capsule = _new_capsule(block_address, _CAPSULE_NAME, None)
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    assert made.data_ptr() == address
    assert made.device.type == ("cuda" if device_type == _DL_CUDA else "cpu")
    return made
