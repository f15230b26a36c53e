"""Memory of running requests for others: vLLM's own preemption, the requests chosen by extent."""

from __future__ import annotations

import inspect
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from kvtide.pool.victims import Candidate, choose_victims
from kvtide.ranks.growing import GrowingMemory

__all__ = ["Preemption"]

# Of the requests that vLLM would preempt first.
_CONSIDERED = 64


class _Drops:
    """From 0.28 on vLLM drops the output of steps in flight itself, if it is told to."""

    def may(self, request: Any) -> bool:
        return True

    def preempt(self, scheduler: Any, request: Any) -> None:
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)


class _Discards:
    """Before that the asynchronous scheduler counts what it has to discard, as for its reset."""

    def may(self, request: Any) -> bool:
        return True

    def preempt(self, scheduler: Any, request: Any) -> None:
        scheduler._preempt_request(request, time.monotonic())
        request.async_tokens_to_discard += request.num_output_placeholders
        request.num_output_placeholders = 0


class _Waits:
    """Before that the other scheduler has no such count: only what no step in flight computes."""

    def may(self, request: Any) -> bool:
        return bool(request.num_in_flight_tokens == 0)

    def preempt(self, scheduler: Any, request: Any) -> None:
        scheduler._preempt_request(request, time.monotonic())


def era_of(scheduler: Any) -> _Drops | _Discards | _Waits:
    """How this vLLM takes the memory of a request whose output may be on its way.

    The output is dropped and computed again: the request may be resumed before it arrives.
    """
    if "drop_stale_output" in inspect.signature(scheduler._preempt_request).parameters:
        return _Drops()
    return _Discards() if isinstance(scheduler, AsyncScheduler) else _Waits()


class Preemption:
    """Preempts running requests for a min, a higher priority, or whoever asked for it.

    Called before vLLM schedules, so that what comes free can be given away before anything else
    takes it. Steps in flight may still touch it: ranks unmap behind them.
    """

    def __init__(self, scheduler: Any, memory: GrowingMemory[Any]) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._era = era_of(scheduler)
        self.preempted = 0

    def serve(self) -> bool:
        """Preempt for what is demanded beyond idle memory; whether to look again soon."""
        scheduler, memory = self._scheduler, self._memory
        wanted = memory.giving.demanded_of_running()
        if not any(wanted):
            return False
        requests = [r for r in scheduler.running[-_CONSIDERED:] if self._era.may(r)]
        candidates = [Candidate(self._own_blocks(r), r.num_computed_tokens) for r in requests]
        live = memory.standing().live
        chosen = choose_victims(memory.pool.shapes, live, candidates, wanted)
        if not chosen:
            memory.giving.nothing_more()
            return False
        memory.giving.preempts(len(chosen), sum(len(candidates[i].blocks) for i in chosen))
        # The last first, so that they come back in the order in which they ran.
        for i in sorted(chosen, reverse=True):
            self._preempt(requests[i])
        return True

    def _own_blocks(self, request: Any) -> list[int]:
        """Numbers of the blocks that no other request holds."""
        manager = self._scheduler.kv_cache_manager
        blocks = manager.block_pool.blocks
        return [
            block
            for group in manager.get_block_ids(request.request_id)
            for block in group
            if blocks[block].ref_cnt == 1 and not blocks[block].is_null
        ]

    def _preempt(self, request: Any) -> None:
        scheduler = self._scheduler
        scheduler.running.remove(request)
        self._era.preempt(scheduler, request)
        # As if it had not been scheduled by the step before: the worker is told all of it again.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self.preempted += 1
