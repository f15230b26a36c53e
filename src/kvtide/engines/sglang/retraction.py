"""Memory of running requests for others: SGLang's own retraction, the requests chosen by extent."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from sglang.srt.managers.schedule_batch import release_req

from kvtide.engines.sglang.agreement import Agreement
from kvtide.engines.sglang.memory import SlotMemory
from kvtide.pool.victims import Candidate, choose_victims

__all__ = ["Retraction", "let_go_of_chunk"]

_log = logging.getLogger("sglang.kvtide")

# Of the requests that decode, the last ones.
_CONSIDERED = 64
# While others wait and nobody calls: how often an engine with requests looks what it owes them.
_OWING_SECONDS = 0.05


class Retraction:
    """Retracts requests for a min, a higher priority, or whoever asked for it.

    SGLang retracts where it updates the batch that decodes: it is told that the memory does not
    do as long as one of the chosen requests is there, and they are the first to go.

    Parameters
    ----------
    scheduler
        SGLang's.
    memories
        By kind; requests are chosen by what they hold of `full`.
    agreement
        All ranks retract the same.

    Attributes
    ----------
    due
        Granules of full attention that others may have although running requests hold them; the
        same in all ranks.
    """

    def __init__(
        self, scheduler: Any, memories: dict[str, SlotMemory], agreement: Agreement
    ) -> None:
        self._scheduler = scheduler
        self._memories = memories
        self._agreement = agreement
        self._look_at = 0.0
        self._victims: list[Any] = []
        self.due = 0

    # What is owed ------------------------------------------------------------------------------

    def look(self, *, called: bool) -> tuple[bool, int]:
        """Whether anything is owed by this rank's ledger, and how much of running requests."""
        now = time.monotonic()
        if not called and not self.due and now < self._look_at:
            return False, 0
        self._look_at = now + _OWING_SECONDS
        memory = self._memories["full"]
        if not memory.owing:
            return False, 0
        for m in self._memories.values():
            m.publish()
        return True, memory.sharing.demanded_of_running()[0]

    def nothing_more(self) -> None:
        """No request runs whose memory could go: whoever asked for it is done."""
        self.due = 0
        self._memories["full"].sharing.nothing_more()

    @property
    def defers_prompts(self) -> bool:
        """Whether no prompt may be taken up: what runs has to make room first."""
        return self.due > 0

    # Where SGLang retracts ---------------------------------------------------------------------

    def retracts(self, batch: Any, selected: Iterable[int] | None) -> bool:
        """Whether a chosen request is in a batch: at first (None) they are chosen here."""
        if selected is not None:
            chosen = {id(r) for r in self._victims}
            return any(id(batch.reqs[i]) in chosen for i in selected)
        self._victims = self._choose(batch.reqs) if self.due else []
        if self.due and not self._victims:
            self.nothing_more()
        return bool(self._victims)

    @contextmanager
    def in_order(self, batch: Any) -> Iterator[None]:
        """Within it, SGLang retracts the chosen ones of a batch first, the oldest before others."""
        if not self._victims:
            yield
            return
        native, chosen = batch._get_decode_retraction_order, {id(r) for r in self._victims}

        def order(requests: list[Any]) -> list[int]:
            kept = [i for i in native(requests) if id(requests[i]) not in chosen]
            # It takes them from the end, and they queue in that order.
            going = [i for i, r in enumerate(requests) if id(r) in chosen]
            return kept + going[::-1]

        batch._get_decode_retraction_order = order
        try:
            yield
        finally:
            del batch._get_decode_retraction_order
            _log.info("kvtide: %d requests retracted for others", len(self._victims))
            self._victims, self.due = [], 0

    def _choose(self, requests: list[Any]) -> list[Any]:
        considered = [
            r
            for r in requests[-_CONSIDERED:]
            if r.kv.holds_kv and r.beam_group is None and r.to_finish is None
        ]
        memory = self._memories["full"]
        held = {id(r): self._blocks(r) for r in requests if r.kv.holds_kv}
        holders = np.zeros(memory.pool.blocks_total, np.int64)
        for blocks in held.values():
            holders[blocks] += 1
        candidates = [
            Candidate(own[holders[own] == 1].tolist(), int(r.kv.kv_allocated_len))
            for r in considered
            for own in [held[id(r)]]
        ]
        live = memory.standing().live
        chosen = choose_victims(memory.pool.shapes, live, candidates, [self.due])
        # The ranks hold the same in the same places; should they not, the first one chooses.
        chosen = self._agreement.gather(chosen)[0]
        if chosen:
            memory.sharing.preempts(len(chosen), sum(len(candidates[i].blocks) for i in chosen))
        return [considered[i] for i in chosen]

    def _blocks(self, request: Any) -> npt.NDArray[np.int64]:
        """Numbers of the blocks of full attention that a request holds, with others or alone."""
        rows = self._scheduler.req_to_token_pool.req_to_token
        slots = rows[request.kv.req_pool_idx, : request.kv.kv_allocated_len].cpu().numpy()
        return np.unique(slots.astype(np.int64) // self._scheduler.page_size)


def let_go_of_chunk(scheduler: Any) -> None:
    """Put a prompt that is taken up in chunks back to the head of the queue.

    What is computed of it stays in the prefix cache, if there is one: others may have it then. For
    an engine of which nothing runs: no result of the prompt is outstanding.
    """
    request, scheduler.chunked_req = scheduler.chunked_req, None
    release_req(
        req=request,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
    scheduler.waiting_queue.insert(0, request)
    _log.info("kvtide: a prompt that was taken up in part waits, there is no memory for the rest")
