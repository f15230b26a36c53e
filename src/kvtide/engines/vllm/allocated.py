"""What vLLM really allocated for KV and state, listed by the layers that lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvtide.sizing.layers import Kind
from kvtide.sizing.rows import Allocation

__all__ = ["list_allocated"]

_KINDS = {
    "FullAttentionSpec": Kind.FULL,
    "SinkFullAttentionSpec": Kind.FULL,
    "SlidingWindowSpec": Kind.SLIDING,
    "ChunkedLocalAttentionSpec": Kind.CHUNKED,
    "CrossAttentionSpec": Kind.CROSS,
    "MLAAttentionSpec": Kind.MLA,
}
_STATES = {
    "MAMBA1": Kind.MAMBA1,
    "MAMBA2": Kind.MAMBA2,
    "GDN_ATTN": Kind.GATED_DELTA_NET,
    "LINEAR": Kind.LINEAR,
    "SHORT_CONV": Kind.SHORT_CONV,
}
_FIELDS = {field.name for field in fields(KVCacheTensor)}
_STRIDED = "layer_stride" in _FIELDS


class _Place(NamedTuple):
    """Where one layer lies: bytes from the start of all of it, or of a block where interleaved."""

    layer: str
    offset_bytes: int
    page_bytes: int
    content_bytes: int
    kind: str


def list_allocated(
    config: KVCacheConfig, listed: Sequence[int], unlisted: Sequence[int]
) -> tuple[Allocation, ...]:
    """Divide what was asked for among the layers that share it; the sum is what was asked for.

    Parameters
    ----------
    listed, unlisted
        Bytes of each call that allocated: those that the configuration lists, and others.

    Returns
    -------
    tuple of Allocation
        One for each place in a block, what pads them, and each unlisted call.
    """
    slabs = _slabs(_places(config))
    found = []
    for places in slabs:
        start = places[0].offset_bytes
        page = places[0].page_bytes
        content = min(page, max(p.offset_bytes - start + p.content_bytes for p in places))
        found.append(
            Allocation(
                places[0].layer,
                " + ".join(dict.fromkeys(p.kind for p in places)),
                tuple(p.layer for p in places),
                config.num_blocks,
                content * config.num_blocks,
            )
        )
    padding = sum(listed) - sum(a.bytes for a in found)
    if padding:
        found.append(Allocation("page padding", "padding", (), config.num_blocks, padding))
    for number, size in enumerate(unlisted):
        found.append(Allocation(f"unlisted call {number}", "unlisted", (), 1, size))
    return tuple(found)


def _places(config: KVCacheConfig) -> list[_Place]:
    specs = {
        layer: vars(group.kv_cache_spec).get("kv_cache_specs", {}).get(layer, group.kv_cache_spec)
        for group in config.kv_cache_groups
        for layer in group.layer_names
    }
    places = []
    offset = 0
    for tensor in config.kv_cache_tensors:
        if _STRIDED:
            for number, layer in enumerate(tensor.layers):
                at = tensor.offset + number * tensor.layer_stride
                places.append(_place(layer, at, specs[layer]))
            continue
        # Before 0.29 a tensor is one place: packed, where it says so, or alone.
        packed = "block_stride" in _FIELDS and tensor.block_stride
        at = tensor.offset if packed else offset
        places += [_place(layer, at, specs[layer]) for layer in tensor.shared_by]
        offset += max(specs[layer].page_size_bytes for layer in tensor.shared_by)
    if _STRIDED and not _interleaved(config):
        # Layer after layer: a place's bytes in a block are its offset over the number of blocks.
        places = [p._replace(offset_bytes=p.offset_bytes // config.num_blocks) for p in places]
    return places


def _interleaved(config: KVCacheConfig) -> bool:
    """Whether a block's layers lie side by side, so that offsets are within a block."""
    widest = max(tensor.block_stride for tensor in config.kv_cache_tensors)
    size: int = config.kv_cache_tensors[0].size
    return bool(widest * config.num_blocks == size)


def _place(layer: str, offset_bytes: int, spec: Any) -> _Place:
    name = type(spec).__name__
    state = vars(spec).get("mamba_type")
    if state is not None:
        known = _STATES.get(state if isinstance(state, str) else state.name)
        kind = str(state) if known is None else known.value
    elif vars(spec).get("cache_role") is not None and spec.cache_role.name == "INDEXER":
        kind = Kind.INDEXER.value
    else:
        kind = _KINDS[name].value if name in _KINDS else name
    content_bytes = spec.page_size_bytes
    if vars(spec).get("page_size_padded") is not None:
        content_bytes = replace(spec, page_size_padded=None).page_size_bytes
    return _Place(layer, offset_bytes, spec.page_size_bytes, content_bytes, kind)


def _slabs(places: Sequence[_Place]) -> list[list[_Place]]:
    """The places by the bytes that they share; layers of several groups take turns on them."""
    slabs: list[list[_Place]] = []
    # Stable: among equals the order of the groups stays.
    for place in sorted(places, key=lambda p: (p.offset_bytes, -p.page_bytes)):
        first = slabs[-1][0] if slabs else None
        if first is not None and place.offset_bytes < first.offset_bytes + first.page_bytes:
            slabs[-1].append(place)
        else:
            slabs.append([place])
    return slabs
