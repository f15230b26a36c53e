"""The calls by which an SGLang pool allocates its buffers: listed first, then answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from kvtide.errors import UnsupportedError
from kvtide.memory.tensors import tensor_over
from kvtide.pool import Geometry, Strip
from kvtide.ranks.memory import RankMemory

__all__ = ["Answered", "Buffer", "geometry_of", "layered", "list_buffers", "state_buffers"]


class Buffer(NamedTuple):
    """One allocation: its shape, its dtype, and along which axis its rows lie.

    Rows are blocks or slots: `(rows, ...)`, or with an axis before them `(layers, rows, ...)`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int = 0

    @property
    def layers(self) -> int:
        """How often all rows are there."""
        return self.shape[0] if self.axis else 1

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def geometry_of(
    buffers: Sequence[Buffer], blocks_total: int, granularity_bytes: int
) -> tuple[Geometry, list[int]]:
    """The geometry of a pool's buffers in one arena, and each buffer's offset there in bytes.

    Every layer of every buffer is a strip of `blocks_total` blocks of equal size, block 0 first.
    Buffers begin at whole granules, so that the same blocks lie in the first granule of each.
    """
    strips, offsets, end = [], [], 0
    for buffer in buffers:
        offset = -(-end // granularity_bytes) * granularity_bytes
        offsets.append(offset)
        if buffer.size_bytes == 0:
            # Such as the part of a state that a model does not have.
            continue
        layer_bytes, rest = divmod(buffer.size_bytes, buffer.layers)
        assert rest == 0
        rows = buffer.shape[buffer.axis]
        # What lies behind the last whole block is in no block, but in the arena.
        block_bytes = layer_bytes // rows * (rows // blocks_total)
        for layer in range(buffer.layers):
            strips.append(Strip(offset + layer * layer_bytes, block_bytes, block_bytes))
        end = offset + buffer.size_bytes
    granules = -(-end // granularity_bytes)
    return (
        Geometry(blocks_total, tuple(strips), granules * granularity_bytes, granularity_bytes),
        offsets,
    )


def layered(buffer: Buffer, slots: int, pages: int) -> Buffer:
    """A buffer of keys or values as it is laid out: rows are slots, or pages, or halves of such.

    From 0.5.23 keys and values of a layer are the halves of one buffer, each of whole pages.

    Raises
    ------
    UnsupportedError
        It is neither.
    """
    for axis, rows in enumerate(buffer.shape[:2]):
        if rows == pages or (slots <= rows and rows // pages == slots // pages):
            return buffer._replace(axis=axis)
    import sglang

    raise UnsupportedError(
        f"SGLang {sglang.__version__} has a buffer of shape {buffer.shape} for {slots} slots in "
        f"{pages} pages, a layout that kvtide does not know"
    )


def state_buffers(parameters: Any, layers: int, size: int) -> list[Buffer]:
    """The buffers of a pool of recurrent states: slots 0 to `size` of each of these layers."""
    shapes = [(shape, parameters.dtype.conv) for shape in parameters.shape.conv]
    shapes.append((parameters.shape.temporal, parameters.dtype.temporal))
    return [Buffer((layers, size + 1, *shape), dtype, axis=1) for shape, dtype in shapes]


class _Listed(TorchFunctionMode):
    """Notes what is allocated, and gives tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[Buffer] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        buffer = _asked(args, kwargs)
        self.buffers.append(buffer)
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")


class Answered(TorchFunctionMode):
    """Answers exactly these allocations, in their order, with an arena's addresses."""

    def __init__(
        self, buffers: Sequence[Buffer], offsets: Sequence[int], memory: RankMemory, index: int
    ) -> None:
        super().__init__()
        self._left = list(zip(buffers, offsets, strict=True))
        self._memory = memory
        self._index = index

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or not self._left:
            return func(*args, **kwargs)
        asked, (buffer, offset) = _asked(args, kwargs), self._left[0]
        if (asked.shape, asked.dtype) != (buffer.shape, buffer.dtype):
            return func(*args, **kwargs)
        del self._left[0]
        if buffer.size_bytes == 0:
            return func(*args, **kwargs)
        arena = self._memory.arena
        flat = tensor_over(
            arena.address + offset, buffer.size_bytes, arena.device.info, self._index
        )
        return flat.view(buffer.dtype).view(buffer.shape)

    def check(self, what: str) -> None:
        """Whether all of them were asked for.

        Raises
        ------
        UnsupportedError
            Some of the pool is allocated otherwise.
        """
        if self._left:
            import sglang

            raise UnsupportedError(
                f"SGLang {sglang.__version__} did not ask for {len(self._left)} of the buffers of "
                f"its {what}: it allocates in a way that kvtide does not know; supported are "
                "0.5.20 to 0.5.23"
            )


def _asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Buffer:
    size = kwargs.get("size", args[0] if len(args) == 1 else args)
    shape = (size,) if isinstance(size, int) else tuple(int(n) for n in size)
    return Buffer(shape, kwargs.get("dtype") or torch.get_default_dtype())


def list_buffers(create: Callable[[], object]) -> list[Buffer]:
    """What a call allocates by `torch.zeros`; it is left with tensors without memory."""
    with _Listed() as listed:
        create()
    return listed.buffers
