"""How many free blocks the coming steps of a vLLM engine will need."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, NamedTuple

from kvtide.engines.vllm.eras import waiting_queues

__all__ = ["Ahead", "Need"]

# Steps in flight, and two.
_STEPS_AHEAD = 3


class _Group(NamedTuple):
    """A KV-cache group: tokens of a block, and the most tokens a request ever keeps (or None).

    A recurrent state is as large whatever it stands for; some are kept along the way for others.
    """

    block_tokens: int
    window_tokens: int | None
    recurrent: bool


class Ahead(NamedTuple):
    """Blocks that the next step needs, and that the next three need."""

    near: int
    far: int


class Need:
    """An upper bound, by the running requests and the head of the queue."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._queues = waiting_queues(scheduler)
        self._batch_tokens = scheduler.max_num_scheduled_tokens
        self._groups = [
            self._read(g.kv_cache_spec) for g in scheduler.kv_cache_config.kv_cache_groups
        ]
        # Blocks of the prompts that one step can take up.
        self.batch_blocks = self._for_more(0, self._batch_tokens)
        # A request that only decodes: tokens that it lacks at a step, at the most, and blocks.
        self._decoding_tokens = 1 + scheduler.num_spec_tokens
        soon = self._decoding_tokens + scheduler.num_lookahead_tokens + _STEPS_AHEAD
        self._decoding_blocks = sum(-(-soon // group.block_tokens) for group in self._groups)
        # Of states that do not grow by the token it is not known.
        self._regular = not any(group.recurrent for group in self._groups)
        self._all_decode = False

    def _read(self, spec: Any) -> _Group:
        # Group specs of several kinds wrap those of their layers, which agree in what matters here.
        members = vars(spec).get("kv_cache_specs")
        if members:
            spec = next(iter(members.values()))
        window = vars(spec).get("sliding_window") or vars(spec).get("attention_chunk_size")
        kept = None if window is None else window + self._batch_tokens
        return _Group(spec.block_size, kept, recurrent="mamba_type" in vars(spec))

    def blocks(self) -> int:
        """Blocks that the next step needs: `near` of `ahead`."""
        return self.ahead().near

    def ahead(self) -> Ahead:
        """What the running requests need for the steps in flight plus two, and the prompts at the
        head of the queue as far as the next step, or the next three, can take them up."""
        scheduler = self._scheduler
        needed = 0
        for request in scheduler.running:
            ahead = request.num_tokens_with_spec - request.num_computed_tokens + _STEPS_AHEAD
            needed += self._for_more(request.num_computed_tokens, ahead)
        room = scheduler.max_num_running_reqs - len(scheduler.running)
        near, tokens, far_tokens = needed, 0, _STEPS_AHEAD * self._batch_tokens
        for request in chain(*self._queues()):
            if room <= 0 or tokens >= far_tokens:
                break
            needed += self._for_more(0, request.num_tokens + _STEPS_AHEAD)
            if tokens < self._batch_tokens:
                near = needed
            room -= 1
            tokens += request.num_tokens
        return Ahead(near, needed)

    def most(self) -> int | None:
        """Blocks that the coming steps cannot need more than, where nobody waits and all that run
        decode: known without a look at each of them. None where it is not."""
        if not self._regular or any(self._queues()):
            self._all_decode = False
            return None
        running = self._scheduler.running
        # Whoever runs has waited before, and who has begun to decode does so to the end.
        self._all_decode = self._all_decode or all(
            r.num_tokens_with_spec + r.num_output_placeholders - r.num_computed_tokens
            <= self._decoding_tokens
            for r in running
        )
        return len(running) * self._decoding_blocks if self._all_decode else None

    def heads(self) -> list[Any]:
        """The requests at the heads of the queues."""
        return [request for queue in self._queues() for request in islice(queue, 1)]

    def several_wait(self) -> bool:
        """Whether two requests or more wait."""
        return len(list(islice(chain(*self._queues()), 2))) == 2

    def least(self, tokens: int) -> int:
        """Blocks without which no request of so many tokens can run, all groups together."""
        needed = 0
        for size, window, recurrent in self._groups:
            kept = tokens if window is None else min(tokens, window)
            needed += 1 if recurrent else -(-kept // size)
        return needed

    def _for_more(self, computed: int, more: int) -> int:
        """Blocks for so many tokens beyond those computed, all groups together."""
        needed = 0
        for size, window, _ in self._groups:
            if window is not None and more > window:
                more = window
            held = -computed % size
            if more > held:
                needed += -(-(more - held) // size)
        return needed
