"""vLLM's block pool with only backed blocks in circulation, the lowest handed out first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool

from kvtide.pool import FreeBlocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvtide.ranks.growing import GrowingMemory

__all__ = ["ElasticBlockPool"]


class ElasticBlockPool(BlockPool):
    """vLLM's own pool, adopted: its free queue holds only what the prefix cache holds.

    Free blocks that hold nothing lie in `free`; blocks without memory are in neither.

    Attributes
    ----------
    spares_cache
        Memory is coming that serves as well: meanwhile nothing is evicted from the prefix cache.
    """

    spares_cache: bool = False
    free: FreeBlocks[KVCacheBlock]
    memory: GrowingMemory[KVCacheBlock]

    @classmethod
    def adopt(cls, pool: BlockPool) -> ElasticBlockPool:
        """Make vLLM's pool, which others refer to already, one of this class: nothing is free."""
        assert type(pool) is BlockPool
        queue = pool.free_block_queue
        queue.popleft_n(queue.num_free_blocks)
        pool.__class__ = cls
        adopted: ElasticBlockPool = pool
        adopted.free = FreeBlocks(pool.num_gpu_blocks)
        return adopted

    # What elastic memory needs -------------------------------------------------------------------

    @property
    def cached_count(self) -> int:
        """Blocks that only the prefix cache holds."""
        count: int = self.free_block_queue.num_free_blocks
        return count

    def cached_ids(self) -> Sequence[int]:
        """Their numbers, first to be evicted first."""
        return [block.block_id for block in self.free_block_queue.get_all_free_blocks()]

    def drop_cached(self, gone: npt.NDArray[np.bool_]) -> None:
        """Evict the cached blocks that are marked; they are out of circulation."""
        queue = self.free_block_queue
        leaving = [block for block in queue.get_all_free_blocks() if gone[block.block_id]]
        if self._watched:
            self._notify_reuse(leaving)
        for block in leaving:
            self._maybe_evict_cached_block(block)
            queue.remove(block)

    @property
    def _watched(self) -> bool:
        """Whether anybody reads blocks until they are reused (0.30 and later)."""
        return bool(self.__dict__.get("_reuse_watchers"))

    # What vLLM calls -----------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks: those that hold nothing first, then evict from the prefix cache."""
        taken = self.free.take(num_blocks)
        missing = num_blocks - len(taken)
        if missing:
            if missing > self.free_block_queue.num_free_blocks:
                self.free.give(taken)
                raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
            evicted = self.free_block_queue.popleft_n(missing)
            for block in evicted:
                self._maybe_evict_cached_block(block)
            self.memory.journal.evicted_blocks += missing
            taken += evicted
        if self._watched:
            self._notify_reuse(taken)
        for block in taken:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        return taken

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take blocks back; those of the prefix cache stay until memory is asked for."""
        empty: list[KVCacheBlock] = []
        cached: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (empty if block._block_hash is None else cached).append(block)
        self.free.give(empty)
        if cached:
            self.free_block_queue.append_n(cached)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be had now: backed and not in use, nor in a cache that is spared."""
        count: int = self.free.count
        return count if self.spares_cache else count + self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """The share of all blocks, backed or not, that requests use."""
        return self.memory.used_count / max(1, self.num_gpu_blocks - 1)

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache, if no request runs; its memory goes at the next step."""
        if self.memory.used_count:
            return False
        queue = self.free_block_queue
        cached = queue.popleft_n(queue.num_free_blocks)
        if self._watched:
            self._notify_reuse(cached)
        self.free.give(cached)
        # vLLM's own bookkeeping, which counts with all blocks free.
        done: bool = _reset_natively(self)
        assert done
        self.memory.trim_soon = True
        return True


def _reset_natively(pool: Any) -> bool:
    """vLLM's own reset, told that only the null block is in use."""
    pool.get_num_free_blocks = lambda: pool.num_gpu_blocks - 1
    try:
        done: bool = BlockPool.reset_prefix_cache(pool)
        return done
    finally:
        del pool.get_num_free_blocks
