"""What tests do inside a server's workers: methods that `--worker-extension-cls` adds to them.

They are called by the server's development endpoint `/collective_rpc`, between two steps.
"""

from __future__ import annotations

import ctypes
from typing import Any

# In bfloat16 and float32 alike about 1.0: a value that no cache holds everywhere.
_WRONG = b"\x80\x3f"


class CacheProbe:
    """Looks into a worker's KV cache, and does to it what must never happen."""

    def probe_corrupt(self: Any, group: str) -> dict[str, int]:
        """Overwrite one live block of the only running request, in one KV-cache group.

        Of an attention group it is the last full block, of one of recurrent states the last.
        Answers how many tokens were computed and which block was taken; `block` is 0 while there
        is no request that has one.
        """
        runner = self.model_runner
        if len(runner.requests) != 1:
            return {"tokens": 0, "block": 0}
        (request,) = runner.requests.values()
        blocks = request.block_ids[int(group)]
        spec = type(runner.kv_cache_config.kv_cache_groups[int(group)].kv_cache_spec).__name__
        last = 1 if "Mamba" in spec else 2
        block = blocks[-last] if len(blocks) >= last else 0
        if block:
            endpoint = self.kvtide
            base = endpoint.memory.arena.address
            for offset, stride, length in endpoint._geometry.strips:
                at = base + offset + block * stride
                ctypes.memmove(at, _WRONG * (length // 2), length)
        return {"tokens": request.num_computed_tokens, "block": block}

    def probe_groups(self: Any) -> dict[str, Any]:
        """The kinds of the KV-cache groups, and the tokens of a block of each."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        return {
            "kinds": [type(g.kv_cache_spec).__name__ for g in groups],
            "tokens": [g.kv_cache_spec.block_size for g in groups],
        }

    def probe_strips(self: Any) -> list[list[int]]:
        """Where the parts of blocks lie in the arena: offset, stride, length."""
        return [list(strip) for strip in self.kvtide._geometry.strips]

    def probe_stop_mapping(self: Any) -> None:
        """From here on this worker confirms what it is told to map, and maps nothing."""
        self.kvtide.memory.arena.grow = lambda spans: True
