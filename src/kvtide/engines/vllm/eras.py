"""What differs between vLLM's eras, chosen once by what the engine has: KV layout, queues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import vllm
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvtide.errors import UnsupportedError
from kvtide.pool import Geometry, Strip

__all__ = ["CacheLayout", "choose_reader", "read_layout", "waiting_queues"]


class CacheLayout(NamedTuple):
    """What one worker allocates for its KV cache, and where the blocks lie in it.

    Attributes
    ----------
    allocations
        `(size, offset)` in bytes of each `torch.zeros` that vLLM will call for, in its order; the
        offset is where in the arena it lies.
    geometry
        Of all of them, in one arena.
    kind
        `block-major` when all of a block lies side by side, else `per-layer`.
    """

    allocations: tuple[tuple[int, int], ...]
    geometry: Geometry
    kind: str


def read_layout(config: KVCacheConfig, granularity_bytes: int) -> CacheLayout:
    """The layout of a worker's KV-cache configuration.

    Raises
    ------
    UnsupportedError
        The configuration is of no known era, or asks for memory that is not the device's.
    """
    allocations, strips = choose_reader()(config, granularity_bytes)
    geometry = Geometry.of(config.num_blocks, _joined(strips), granularity_bytes)
    kind = "block-major" if len(geometry.strips) == 1 else "per-layer"
    return CacheLayout(tuple(allocations), geometry, kind)


def _joined(strips: list[Strip]) -> list[Strip]:
    """Join strips that lie side by side in every block."""
    joined: list[Strip] = []
    for strip in sorted(set(strips)):
        if joined:
            last = joined[-1]
            adjacent = strip.offset_bytes <= last.offset_bytes + last.length_bytes
            end = max(
                strip.offset_bytes + strip.length_bytes, last.offset_bytes + last.length_bytes
            )
            length = end - last.offset_bytes
            if strip.stride_bytes == last.stride_bytes >= length and adjacent:
                joined[-1] = Strip(last.offset_bytes, last.stride_bytes, length)
                continue
        joined.append(strip)
    return joined


def _page_bytes(config: KVCacheConfig, layer: str) -> int:
    group = next(g for g in config.kv_cache_groups if layer in g.layer_names)
    spec = group.kv_cache_spec
    members: dict[str, Any] | None = (
        spec.kv_cache_specs if type(spec).__name__ == "UniformTypeKVCacheSpecs" else None
    )
    page: int = (spec if members is None else members[layer]).page_size_bytes
    return page


def _read_strided(
    config: KVCacheConfig, granularity_bytes: int
) -> tuple[list[tuple[int, int]], list[Strip]]:
    """0.29 and later: one allocation; each tensor places layers in it by strides."""
    strips = []
    for tensor in config.kv_cache_tensors:
        if tensor.host_resident:
            raise UnsupportedError(
                "a KV cache that vLLM keeps in host memory (HiSparse) is not supported by kvtide; "
                "start without it"
            )
        page = _page_bytes(config, tensor.layers[0])
        for number in range(len(tensor.layers)):
            offset = tensor.offset + number * tensor.layer_stride
            strips.append(Strip(offset, tensor.block_stride, page))
    return [(config.kv_cache_tensors[0].size, 0)], strips


def _read_shared(
    config: KVCacheConfig, granularity_bytes: int
) -> tuple[list[tuple[int, int]], list[Strip]]:
    """0.20 to 0.28: one allocation a tensor, or from 0.24 one for all tensors that are packed."""
    packed = [t for t in config.kv_cache_tensors if _block_stride(t)]
    if packed:
        size = packed[0].size
        strips = [
            Strip(t.offset, t.block_stride, _page_bytes(config, t.shared_by[0])) for t in packed
        ]
        if len(packed) != len(config.kv_cache_tensors):
            raise UnsupportedError(
                f"vLLM {vllm.__version__} packs only some of this model's KV-cache tensors; kvtide "
                "supports all packed or none"
            )
        return [(size, 0)], strips
    allocations, strips, offset = [], [], 0
    for tensor in config.kv_cache_tensors:
        page = tensor.size // config.num_blocks
        allocations.append((tensor.size, offset))
        strips.append(Strip(offset, page, page))
        offset += -(-tensor.size // granularity_bytes) * granularity_bytes
    return allocations, strips


def _block_stride(tensor: KVCacheTensor) -> int:
    stride: int = tensor.block_stride if "block_stride" in _FIELDS else 0
    return stride


_FIELDS = {field.name for field in fields(KVCacheTensor)}
_Reader = Callable[[KVCacheConfig, int], tuple[list[tuple[int, int]], list[Strip]]]


def choose_reader() -> _Reader:
    """The reader for this vLLM.

    Raises
    ------
    UnsupportedError
        It is of no known era.
    """
    if {"size", "layers", "layer_stride", "block_stride", "offset"} <= _FIELDS:
        return _read_strided
    if {"size", "shared_by"} <= _FIELDS:
        return _read_shared
    raise UnsupportedError(
        f"vLLM {vllm.__version__} describes its KV cache by {sorted(_FIELDS)}, which kvtide does "
        "not know; vLLM 0.20 to 0.33 are known"
    )


# What holds the requests that wait, the first to be taken up first: to 0.31, and from 0.32 on.
_QUEUES = (("waiting", "skipped_waiting"), ("kv_holding_waiting", "waiting"))


def waiting_queues(scheduler: Any) -> Callable[[], tuple[Any, ...]]:
    """A call that gives the queues of this vLLM's scheduler, as they are then.

    Raises
    ------
    UnsupportedError
        It has none that are known.
    """
    for names in _QUEUES:
        if vars(scheduler).keys() >= set(names):
            return lambda: tuple(vars(scheduler)[name] for name in names)
    raise UnsupportedError(
        f"the scheduler of vLLM {vllm.__version__} keeps the requests that wait in no place that "
        f"kvtide knows ({' or '.join(' and '.join(names) for names in _QUEUES)}); 0.28 to 0.32 are "
        "supported"
    )
