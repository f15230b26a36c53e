"""One pool of SGLang's over elastic memory, with its allocator and radix tree, without a server."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvtide.device import open_device
from kvtide.engines.seats import spec_of
from kvtide.engines.sglang.allocators import Conserving
from kvtide.engines.sglang.buffers import Answered, Buffer, geometry_of
from kvtide.engines.sglang.cached import cached_by
from kvtide.engines.sglang.memory import SlotMemory, Slots
from kvtide.engines.sglang.parts import Part
from kvtide.ledger import Ledger
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.seat import Seat
from kvtide.settings import Settings

__all__ = ["World", "sequence"]


class World:
    """One pool of SGLang's on a host device of its own, with its allocator and its tree."""

    def __init__(
        self, directory: Path, page_size: int, pages: int, device_bytes: int, ranks: int = 1
    ) -> None:
        # As the plugin has it: the tree in Rust does not tell which slots it holds.
        os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        name = f"slots-{directory.name}"
        self.device = open_device("host", host_total_bytes=device_bytes, host_uuid=name)
        settings = Settings(dir=directory, host_memory=device_bytes, host_device=(name,))
        self.ledger = Ledger.open(directory, spec_of(self.device.info, settings))
        self.instance = self.ledger.register("a", explicit=True)
        size = pages * page_size
        buffers = [Buffer((size + page_size, 8, 64), torch.float32)] * 4
        geometry, offsets = geometry_of(buffers, pages + 1, self.device.info.granularity_bytes)
        account = self.ledger.enroll(
            self.instance,
            pool_name="kv",
            rank=0,
            blocks_total=geometry.blocks_total,
            block_bytes=geometry.block_bytes,
            sampler=self.device.free_bytes,
        )
        rank = RankMemory(self.device, geometry.arena_bytes, account)
        seat = Seat(self.ledger, self.instance)
        endpoint = Endpoint(rank, seat, geometry, "per-layer", 0, None)
        endpoint.back_null_block()
        self.part = Part("kv", 0, self.device, seat, geometry, rank, endpoint)
        with Answered(buffers, offsets, rank, 0) as answered:
            self.layers = [torch.zeros(b.shape, dtype=b.dtype) for b in buffers]
        answered.check("kv")
        pool = SimpleNamespace()
        self.page_size = page_size
        self.allocator: Any = (
            TokenToKVPoolAllocator(size, torch.float32, "cpu", pool, need_sort=False)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(
                size, page_size, torch.float32, "cpu", pool, need_sort=False
            )
        )
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(parameters)
        self.slots = Slots(self.allocator, cached_by(self.tree, "full", page_size))
        self.memory = SlotMemory(self.part, self.slots, 1, ranks)
        self.inserted: list[list[int]] = []

    def ensure(self, tokens: int) -> bool:
        missing = -(-tokens // self.page_size) - self.memory.free
        return missing <= 0 or self.memory.try_growth(missing) is not None

    def cache(self, ids: list[int]) -> torch.Tensor:
        """As a request that ran: its tokens in the tree, which frees what it has already."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots = self.allocator.alloc(len(ids))
        assert slots is not None
        for layer in self.layers:
            layer[slots] = torch.tensor(ids, dtype=torch.float32)[:, None, None]
        key = RadixKey(array("q", ids), None)
        self.tree.insert(InsertParams(key=key, value=slots))
        self.inserted.append(ids)
        return slots

    def matched(self, ids: list[int]) -> torch.Tensor:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", ids), None)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        if "device_indices" in found._fields:
            return found.device_indices
        # From 0.5.23 they are read along the path to the node.
        return self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]

    def check(self) -> None:
        """Every page is free, cached or live, in one place, backed, and holds what it should."""
        free = self.memory.slots.free.mask(self.memory.pool.blocks_total)
        usable = self.memory.pool.usable_mask()
        assert not (free & ~usable).any()
        assert not free[0]
        held = (
            self.tree.all_values_flatten().numpy() if self.tree.evictable_size() else np.array([])
        )
        cached = np.unique(held // self.page_size).astype(int)
        assert len(cached) * self.page_size == len(held)
        assert usable[cached].all()
        assert not free[cached].any()
        assert self.memory.free + len(cached) + 1 == self.memory.pool.usable_count
        with Conserving():
            assert self.allocator.available_size() + len(held) == self.allocator.size
        for ids in self.inserted:
            slots = self.matched(ids)
            want = torch.tensor(ids[: len(slots)], dtype=torch.float32)
            for layer in self.layers:
                assert torch.equal(layer[slots][:, 0, 0], want)

    def close(self) -> None:
        self.part.endpoint.close()
        self.instance.close()
        self.ledger.close()


def sequence(source: random.Random, length: int, page_size: int) -> list[int]:
    length = -(-length // page_size) * page_size
    return [source.randrange(1 << 20) for _ in range(length)]
