"""Tests only: allocations that fail though they were counted on, and what the scheduler saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook = HookRegistry.register
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    if "FAULT_PROMPTS" in os.environ:
        # By the number of the call; and the first so many of a prompt that is taken up in part.
        misses = {int(n) for n in os.environ["FAULT_PROMPTS"].split(",")}
        later = int(os.environ.get("FAULT_LATER", "0"))
        calls = 0

        def alloc(original: Any, batch: Any) -> Any:
            # Within kvtide's own hook: this one is registered before it.
            nonlocal calls, later
            calls += 1
            in_part = later > 0 and any(r.kv.holds_kv for r in batch.reqs)
            later -= in_part
            if in_part or calls in misses:
                raise RuntimeError("Out of memory. Try to lower your batch size.\ninjected")
            return original(batch)

        hook("sglang.srt.mem_cache.allocation.alloc_for_extend", alloc, HookType.AROUND)
    if "PROBE_LOG" in os.environ:
        path = Path(os.environ["PROBE_LOG"])

        def get_next(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            plan = original(self, *args, **kwargs)
            batch = plan.batch_to_run
            if batch is not None:
                line = {
                    "rank": torch.distributed.get_rank(),
                    "mode": str(batch.forward_mode.name),
                    "reqs": [
                        [len(r.origin_input_ids), len(r.output_ids), r.retraction_count]
                        for r in batch.reqs
                    ],
                }
                with path.open("a") as out:
                    out.write(json.dumps(line) + "\n")
            return plan

        hook(f"{scheduler}.get_next_batch_to_run", get_next, HookType.AROUND)
