"""Block-major KV caches for vLLM 0.24 to 0.28: all layers of a block side by side.

vLLM's own packed path does the rest; the scheduler's configuration is left as it was. From 0.29 on
vLLM chooses among layouts that its workers prefer, and only that order is given here.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheTensor

from kvtide.errors import UnsupportedError

__all__ = ["block_major", "prefer"]

_FIELDS = {field.name for field in fields(KVCacheTensor)}


def block_major(config: Any, vllm_config: Any, wanted: str) -> tuple[Any, str]:
    """A copy of a worker's configuration with its tensors packed, or itself; and why.

    `wanted` is `auto`, `block-major` or `per-layer`.

    Raises
    ------
    UnsupportedError
        Block-major is wanted and cannot be had.

    Returns
    -------
    (KVCacheConfig, str)
        The reason is for people: what made the choice.
    """
    if "layers" in _FIELDS:
        return config, "as vLLM lays it out"
    if {"offset", "block_stride"} <= _FIELDS:
        if any(tensor.block_stride for tensor in config.kv_cache_tensors):
            return config, "packed by vLLM itself"
        obstacle = _obstacle(config, vllm_config)
    else:
        obstacle = "this vLLM cannot pack its KV cache"
    if wanted == "per-layer":
        return config, "as KVTIDE_LAYOUT says"
    if obstacle is not None:
        if wanted == "block-major":
            raise UnsupportedError(f"KVTIDE_LAYOUT=block-major cannot be had: {obstacle}")
        return config, obstacle
    packed = copy.copy(config)
    pages = [tensor.size // config.num_blocks for tensor in config.kv_cache_tensors]
    stride = sum(pages)
    packed.kv_cache_tensors, offset = [], 0
    for tensor, page in zip(config.kv_cache_tensors, pages, strict=True):
        packed.kv_cache_tensors.append(
            KVCacheTensor(
                size=stride * config.num_blocks,
                shared_by=tensor.shared_by,
                offset=offset,
                block_stride=stride,
            )
        )
        offset += page
    return packed, "every backend takes strided blocks"


def prefer(layouts: list[str], wanted: str) -> list[str]:
    """Order the layouts that a worker of vLLM 0.29 or later supports by what is wanted.

    Their names begin with the outermost dimension: `B` for blocks, `L` for layers.

    Raises
    ------
    UnsupportedError
        Block-major is wanted and cannot be had.
    """
    by_block = [name for name in layouts if name.startswith("B")]
    by_layer = [name for name in layouts if not name.startswith("B")]
    if wanted == "per-layer":
        return by_layer or layouts
    if wanted == "block-major":
        if not by_block:
            raise UnsupportedError(
                f"KVTIDE_LAYOUT=block-major cannot be had: the backends take {', '.join(layouts)}"
            )
        return by_block
    return by_block + by_layer


def _obstacle(config: Any, vllm_config: Any) -> str | None:
    """Why this cache cannot be packed; None if it can."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = _spec_of(group, name)
            if not isinstance(spec, AttentionSpec):
                return f"{name} keeps a state ({type(spec).__name__}), not tokens"
            if not spec.indexes_kv_by_block_stride or spec.page_size_padded is not None:
                return f"the attention backend of {name} takes only contiguous blocks"
            backend = layers[name].get_attn_backend()
            if not _takes(backend, spec.block_size):
                return f"{backend.__name__} splits blocks of {spec.block_size} tokens"
    return None


def _spec_of(group: Any, layer: str) -> Any:
    spec = group.kv_cache_spec
    members = vars(spec).get("kv_cache_specs")
    return spec if members is None else members[layer]


def _takes(backend: Any, block_size: int) -> bool:
    """Whether a backend's kernels work on whole blocks of so many tokens."""
    for supported in backend.get_supported_kernel_block_sizes():
        if isinstance(supported, int):
            if supported == block_size:
                return True
        elif block_size % supported.base == 0:
            return True
    return False
