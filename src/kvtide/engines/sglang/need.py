"""How many more free slots the coming steps of an SGLang scheduler will need."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvtide.engines.sglang.eras import era_of

__all__ = ["STATES_PER_REQUEST", "Load", "Need", "states_per_request"]

# Steps in flight, and two.
_STEPS_AHEAD = 3
# A state that is written, one that it was copied from, and one that the tree keeps.
STATES_PER_REQUEST = 3
_EXTRA_BUFFER_STATES = 2


class Need(NamedTuple):
    """Blocks of each kind beyond which nothing more could be used in the coming steps.

    Attributes
    ----------
    full, window
        Free ones.
    states
        Of all requests, those that they hold already among them.
    fresh_states
        Free ones, for requests that have none yet.
    """

    full: int
    window: int
    states: int
    fresh_states: int = 0


class Load(NamedTuple):
    """What the scheduler has to do: requests that decode, the chunk at hand, those that wait.

    Attributes
    ----------
    running
        For each request that decodes, the slots that it has.
    chunk
        Tokens of a prompt that is taken up in chunks, all that are left of it.
    waiting
        Tokens of each prompt that the next step can begin with, all of them, and how many tokens
        it may generate. Two engines that had begun with what they cannot end would wait for each
        other.
    step
        Tokens of prompts that one step takes at most.
    """

    running: list[int]
    chunk: int
    waiting: list[tuple[int, int]]
    step: int = 1 << 62

    def need(self, page_size: int, window: int | None, states: int) -> Need:
        """What it takes.

        Parameters
        ----------
        page_size
            Slots of a block.
        window
            Tokens of a sliding window, None without one.
        states
            States of a request, 0 for a model without.
        """
        decode = sum(
            -(-(held + _STEPS_AHEAD) // page_size) - -(-held // page_size) for held in self.running
        )
        full = decode
        for tokens, _ in self.waiting:
            full += -(-(tokens + _STEPS_AHEAD) // page_size) + 1
        if self.chunk:
            full += -(-self.chunk // page_size) + 1
        in_window = 0
        if window is not None:
            in_window = decode
            for prompt, more in self.waiting:
                tokens = min(prompt, self.step)
                kept = max(tokens - window, 0) + min(tokens + more, window)
                in_window += -(-(kept + _STEPS_AHEAD) // page_size) + 2
            if self.chunk:
                in_window += -(-min(self.chunk, self.step) // page_size) + 2
        requests = len(self.running) + len(self.waiting) + (self.chunk > 0)
        return Need(full, in_window, states * requests, states * len(self.waiting))


def read_load(scheduler: Any, running_batch: Any) -> Load:
    """What a scheduler has to do, before it chooses its next batch."""
    batches = [running_batch]
    last = scheduler.last_batch
    if last is not None and last is not running_batch:
        batches.append(last)
    chunked = scheduler.chunked_req
    seen: dict[int, Any] = {id(r): r for batch in batches for r in batch.reqs}
    if chunked is not None:
        seen.pop(id(chunked), None)
    running = [r.kv.kv_allocated_len for r in seen.values() if r.kv.holds_kv and not r.finished()]
    tokens = scheduler.max_prefill_tokens
    if scheduler.chunked_prefill_size is not None:
        tokens = min(tokens, scheduler.chunked_prefill_size)
    step, chunk = tokens, 0
    if chunked is not None:
        done = era_of(scheduler.tree_cache).prefix_length(chunked)
        left = len(chunked.origin_input_ids) + len(chunked.output_ids) - done
        chunk = max(0, left)
        tokens -= chunk
    waiting: list[tuple[int, int]] = []
    room = scheduler.max_running_requests - len(running)
    for request in scheduler.waiting_queue:
        if room <= 0 or tokens <= 0:
            break
        room -= 1
        prompt = len(request.origin_input_ids) + len(request.output_ids)
        more = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0)
        waiting.append((prompt, more))
        tokens -= prompt
    return Load(running, chunk, waiting, step)


def states_per_request(scheduler: Any) -> int:
    """States that a request may take at once; 0 for a model without."""
    pool = scheduler.req_to_token_pool
    if "mamba_pool" not in vars(pool):
        return 0
    if not scheduler.tree_cache.supports_mamba():
        return 1
    return STATES_PER_REQUEST + (_EXTRA_BUFFER_STATES if pool.enable_mamba_extra_buffer else 0)
