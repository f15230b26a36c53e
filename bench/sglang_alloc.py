"""What SGLang's allocators cost under kvtide, against native: microseconds a page.

    python bench/sglang_alloc.py            in an environment with SGLang; prints JSON

Slots are taken and given back as a server does: requests of some length come and go. Both kinds
run in turns in one process, and the fastest of all rounds counts, in time of the processor: what
else the machine does changes little then.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def native(page_size: int, pages: int) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    pool = SimpleNamespace()
    if page_size == 1:
        return TokenToKVPoolAllocator(pages, torch.float16, "cpu", pool, need_sort=False)
    size = pages * page_size
    return PagedTokenToKVPoolAllocator(size, page_size, torch.float16, "cpu", pool, need_sort=False)


def elastic(page_size: int, pages: int) -> Any:
    """All backed: what is measured is the allocator, not the memory."""
    from kvtide.engines.sglang.allocators import adopt

    allocator = native(page_size, pages)
    free = adopt(allocator, lambda: np.ones(pages + 1, np.bool_))
    free.give_span((), 1, pages + 1)
    return allocator


def work(allocator: Any, rounds: int, request_pages: int, seed: int) -> float:
    """Seconds a page of taking, asking for the count and giving back."""
    source, live, done = random.Random(seed), [], 0
    size = request_pages * allocator.page_size
    started = time.thread_time()
    for _ in range(rounds):
        if allocator.available_size() >= size and (len(live) < 8 or source.random() < 0.5):
            live.append(allocator.alloc(size))
            done += request_pages
        else:
            allocator.free(live.pop(source.randrange(len(live))))
    seconds = time.thread_time() - started
    for slots in live:
        allocator.free(slots)
    return seconds / max(1, done)


def measure(page_size: int, request_pages: int, pages: int, repeats: int) -> dict[str, Any]:
    kinds = {"native": native(page_size, pages), "kvtide": elastic(page_size, pages)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats):
        order = list(kinds) if repeat % 2 else list(kinds)[::-1]
        for name in order:
            allocator = kinds[name]
            found[name] += [work(allocator, 400, request_pages, seed) for seed in range(3)]
    fastest = {name: min(values) * 1e6 for name, values in found.items()}
    return {
        "page_size": page_size,
        "pages_of_request": request_pages,
        "native_us_a_page": round(fastest["native"], 4),
        "kvtide_us_a_page": round(fastest["kvtide"], 4),
        "ratio": round(fastest["kvtide"] / fastest["native"], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(1, 1), (1, 64), (1, 512), (16, 1), (16, 32)]
    results = [measure(page, of, given.pages, given.repeats) for page, of in cases]
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
