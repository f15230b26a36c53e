"""A miss is never a crash: a prompt that cannot be backed waits, as does the last to decode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtide.engines.sglang import current
from kvtide.engines.sglang.eras import era_of

__all__ = ["allocate_prompts", "choose_prompts", "decode_fits", "retract"]

_log = logging.getLogger("sglang.kvtide")

# How SGLang begins or ends what it says of an allocation that it cannot make.
_MISSES = ("ut of memory. Try to lower your batch size", "alloc_req_slots runs out of memory")
_STATE_MISS = "Not enough space for mamba cache"


# Whether it was said that prompts wait, since the last that did not.
_told = False


class _MissError(Exception):
    """A batch of prompts was chosen that the pools cannot back."""


def allocate_prompts(allocate: Callable[[Any], Any], batch: Any) -> Any:
    """Allocate for a batch of prompts; on a miss, nothing of it stays allocated.

    Raises
    ------
    _MissError
        Caught by `choose_prompts`.
    """
    rows = [r.kv.req_pool_idx for r in batch.reqs]
    states = [r.kv.mamba_pool_idx for r in batch.reqs]
    buffers = [r.kv.mamba_ping_pong_track_buffer for r in batch.reqs]
    try:
        return allocate(batch)
    except (RuntimeError, AssertionError) as error:
        text = str(error)
        if not any(miss in text for miss in _MISSES) and _STATE_MISS not in text:
            raise
        pool = batch.req_to_token_pool
        for request, row, state, buffer in zip(batch.reqs, rows, states, buffers, strict=True):
            kv = request.kv
            if kv.mamba_ping_pong_track_buffer is not None and buffer is None:
                pool.mamba_allocator.free(kv.mamba_ping_pong_track_buffer)
                kv.mamba_ping_pong_track_buffer = None
            if kv.mamba_pool_idx is not None and state is None:
                pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
                kv.mamba_pool_idx = None
            if kv.req_pool_idx is not None and row is None:
                pool.free_rows([kv.req_pool_idx])
                kv.req_pool_idx = None
        raise _MissError from error


@dataclass(slots=True)
class _Chunked:
    """The prompt that is taken up in chunks, as it was."""

    request: Any
    extent: Any
    middle_chunks: int


def choose_prompts(
    choose: Callable[..., tuple[Any, Any]], scheduler: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Choose the next batch of prompts; one that cannot be backed goes back to the queue."""
    tide, running = current.tide(), kwargs["running_batch"]
    if tide is not None and tide.retraction.defers_prompts:
        return None, running
    waiting = list(scheduler.waiting_queue)
    chunked, era = scheduler.chunked_req, era_of(scheduler.tree_cache)
    kept = (
        None
        if chunked is None
        else _Chunked(chunked, era.extent(chunked), chunked.inflight_middle_chunks)
    )
    middle = {id(r): r.inflight_middle_chunks for r in waiting}
    nodes = {id(r): r.last_node for r in waiting}
    global _told
    try:
        batch, running = choose(scheduler, *args, **kwargs)
    except _MissError as miss:
        _put_back(scheduler, waiting, kept, middle, nodes)
        running.batch_is_full = not running.is_empty()
        if not _told:
            # Once: a prompt that is taken up in part is tried again in every round.
            _log.info("kvtide: prompts wait, there is no memory for them: %s", _first_line(miss))
            _told = True
        return None, running
    if batch is not None:
        _told = False
    return batch, running


def _first_line(miss: _MissError) -> str:
    return str(miss.__cause__).partition("\n")[0]


def _put_back(
    scheduler: Any,
    waiting: list[Any],
    kept: _Chunked | None,
    middle: dict[int, int],
    nodes: dict[int, Any],
) -> None:
    """Undo what SGLang did to the requests that it chose, but not to those that it preempted."""
    tree = scheduler.tree_cache
    era = era_of(tree)
    left = {id(r) for r in scheduler.waiting_queue}
    for request in waiting:
        if id(request) in left:
            continue
        # Chosen: its prefix was locked for it, and a state may have been copied for it.
        era.unlock(tree, request)
        request.last_node = nodes[id(request)]
        request.inflight_middle_chunks = middle[id(request)]
        _drop_state(tree, request)
    before = {id(r) for r in waiting}
    preempted = [r for r in scheduler.waiting_queue if id(r) not in before]
    scheduler.waiting_queue = waiting + preempted
    scheduler.chunked_req = None if kept is None else kept.request
    if kept is not None:
        era.set_extent(kept.request, kept.extent)
        kept.request.inflight_middle_chunks = kept.middle_chunks


def _drop_state(tree: Any, request: Any) -> None:
    """As SGLang does for a request that it does not choose after all."""
    kv = request.kv
    kv.mamba_cow_src_index = None
    kv.mamba_needs_clear = False
    if kv.holds_mamba and not request.session:
        tree.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
        kv.mamba_pool_idx = None


def retract(
    choose: Callable[[Any], tuple[list[Any], float, list[Any]]], batch: Any
) -> tuple[list[Any], float, list[Any]]:
    """Retract requests that decode; the last one too, where SGLang would give it up."""
    tide = current.tide()
    if tide is None:
        return choose(batch)
    ending = {id(r) for r in batch.reqs if r.to_finish is not None}
    with tide.retraction.in_order(batch):
        retracted, ratio, given_up = choose(batch)
    if not given_up:
        return retracted, ratio, given_up
    most, lost = tide.most_tokens(), []
    for request in given_up:
        tokens = len(request.origin_input_ids) + len(request.output_ids)
        if id(request) in ending or request.beam_group is not None or tokens > most:
            lost.append(request)
        else:
            request.to_finish = None
            retracted.append(request)
    return retracted, ratio, lost


def decode_fits(original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the next tokens fit: not while a request is there whose memory goes to others."""
    tide = current.tide()
    if tide is not None and tide.retraction.due:
        selected = args[0] if args else kwargs.get("selected_indices")
        if tide.retraction.retracts(batch, selected):
            return False
    return original(batch, *args, **kwargs)
