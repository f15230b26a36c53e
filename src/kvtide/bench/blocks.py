"""Allocating and freeing through the elastic pool, against vLLM's own pool in the same process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

__all__ = ["measure_blocks"]


class _Journal:
    """Sums evictions as the real one does."""

    def __init__(self) -> None:
        self.evicted_blocks = 0


class _Still:
    """Elastic memory in a steady state: all that vLLM's pool asks of it."""

    used_count = 0
    trim_soon = False

    def __init__(self) -> None:
        self.journal = _Journal()


def measure_blocks(*, blocks: int = 20_000, pairs: int = 15, caching: bool) -> dict[str, Any]:
    """Nanoseconds a block of one allocation and one free, steady state, in interleaved pairs.

    Requests of 1 to 64 blocks come and go in a seeded order, in the order in which vLLM frees
    them; with `caching` half of the blocks carry a hash when they are freed and are evicted later.
    Needs vLLM.
    """
    from vllm.v1.core.block_pool import BlockPool

    from kvtide.engines.vllm.blocks import ElasticBlockPool

    def native() -> Any:
        return BlockPool(blocks, caching, 16)

    def elastic() -> Any:
        pool = ElasticBlockPool.adopt(BlockPool(blocks, caching, 16))
        pool.memory = cast(Any, _Still())
        pool.free.give_span(pool.blocks, 1, blocks)
        return pool

    pools = native(), elastic()
    ratios, times = [], ([], [])  # type: ignore[var-annotated]
    for number in range(pairs + 1):
        one = [_round(pool, seed=number, caching=caching) for pool in pools]
        if number:
            ratios.append(one[1] / one[0])
            for kept, value in zip(times, one, strict=True):
                kept.append(value)
    ratios.sort()
    return {
        "caching": caching,
        "blocks": blocks,
        "native_ns_per_block": round(statistics.median(times[0]) * 1e9, 1),
        "kvtide_ns_per_block": round(statistics.median(times[1]) * 1e9, 1),
        "ratio": {
            "median": round(statistics.median(ratios), 4),
            "min": round(ratios[0], 4),
            "max": round(ratios[-1], 4),
        },
    }


def _round(pool: Any, *, seed: int, caching: bool) -> float:
    """Seconds a block for some thousand requests that come and go."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 64) for _ in range(2000)]
    slots = [rng.randrange(200) for _ in sizes]
    held: list[list[Any] | None] = [None] * 200
    clock: Callable[[], float] = time.perf_counter
    spent, moved = 0.0, 0
    for number, (size, slot) in enumerate(zip(sizes, slots, strict=True)):
        old = held[slot]
        if old is not None:
            start = clock()
            pool.free_blocks(reversed(old))
            spent += clock() - start
            moved += len(old)
        start = clock()
        taken = pool.get_new_blocks(size)
        spent += clock() - start
        moved += size
        if caching:
            for place, block in enumerate(taken[: size // 2]):
                _cache(pool, block, (seed, number, place))
        held[slot] = taken
    for old in held:
        if old is not None:
            pool.free_blocks(reversed(old))
    return spent / moved


def _cache(pool: Any, block: Any, key: tuple[int, int, int]) -> None:
    """Enter a block into the prefix cache under a key of its own."""
    name = repr(key).encode().ljust(32, b"\0")[:32] + b"\0\0\0\0"
    block.set_block_hash(name)
    pool.cached_block_hash_to_block.insert(name, block)
