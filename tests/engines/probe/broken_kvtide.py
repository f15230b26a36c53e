"""A plugin of vLLM that breaks kvtide in one way, when a test asks for it by `PROBE_FAULT`."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def inject() -> None:
    """In every process of a server."""
    fault = _FAULTS.get(os.environ.get("PROBE_FAULT", ""))
    if fault is not None:
        fault()


def _free_early() -> None:
    """What lies in live blocks is gone at the next step, as if another had had their memory."""
    from kvtide.ranks.endpoint import Endpoint

    original = Endpoint.step

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        arena = self.memory.arena
        for offset, size in self.memory.places:
            ctypes.memset(arena.address + offset, 0, size)

    Endpoint.step = step


def _forget() -> None:
    """Nothing is kept for the next request with the same beginning."""
    from kvtide.engines.vllm.blocks import ElasticBlockPool

    ElasticBlockPool.cache_full_blocks = lambda self, *args, **kwargs: None


def _leave_record() -> None:
    """The instance's record stays in the ledger when its server ends."""
    from kvtide.engines import seats

    seats._leave = lambda: None


_FAULTS = {"frees-early": _free_early, "forgets": _forget, "leaves-record": _leave_record}
