"""SGLang's own pools over an arena hold what native ones hold: float and fp8, MHA and MLA."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sgl_kernel") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

import torch

from kvtide.device import open_device
from kvtide.engines.sglang.buffers import Answered, geometry_of, layered, list_buffers
from kvtide.memory import Arena, Span, cut
from kvtide.units import MIB
from memory_invariants import CountingMeter

pytestmark = pytest.mark.torch

SEED = 20280
LAYERS, SLOTS = 3, 2048
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


def mha(page_size: int, dtype: torch.dtype) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(SLOTS, page_size, dtype, 4, 64, LAYERS, "cpu", False)


def mla(page_size: int, dtype: torch.dtype) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(SLOTS, page_size, dtype, 128, 64, LAYERS, "cpu", False)


def write(pool: Any, layer: int, slots: torch.Tensor, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    like = pool.get_key_buffer(layer)
    values = torch.randn((len(slots), *like.shape[1:]), generator=source)
    if "kv_lora_rank" in vars(pool):
        # Its own way asks for the server's parallel groups.
        pool.kv_buffer[layer][slots] = values.to(pool.dtype).view(pool.store_dtype)
    else:
        keys = values.to(pool.dtype)
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, keys, keys.flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("make", [mha, mla])
def test_a_pool_over_an_arena_holds_what_a_native_one_holds(
    tmp_path: Path, make: Any, page_size: int, dtype: torch.dtype
) -> None:
    print(f"seed {SEED}")
    native, ours = make(page_size, dtype), make(page_size, dtype)
    create = ours._create_buffers_normal if make is mha else ours._create_buffers
    pages = (SLOTS + page_size) // page_size
    buffers = [layered(b, SLOTS + page_size, pages) for b in list_buffers(create)]
    geometry, offsets = geometry_of(buffers, pages, 2 * MIB)
    # A byte a value in fp8: a strip is as large as what native allocates for it.
    assert {b.dtype.itemsize for b in buffers} == {dtype.itemsize}
    device = open_device("host", host_total_bytes=64 * MIB, host_uuid=f"pools-{tmp_path.name}")
    arena = Arena(device, geometry.arena_bytes, CountingMeter())
    assert arena.grow(cut([Span(0, geometry.arena_bytes)], 2 * MIB))
    with Answered(buffers, offsets, SimpleNamespace(arena=arena), 0) as answered:  # type: ignore[arg-type]
        create()
    answered.check("kv")
    slots = torch.arange(page_size, SLOTS, 3)
    for layer in range(LAYERS):
        for pool in (native, ours):
            write(pool, layer, slots, SEED + layer)
    for layer in range(LAYERS):
        for part in ("get_key_buffer", "get_value_buffer"):
            found, want = (getattr(pool, part)(layer)[slots].float() for pool in (ours, native))
            assert torch.equal(found, want)
            assert found.abs().sum() > 0
    arena.close()
