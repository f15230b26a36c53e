"""SGLang's choice of prompts, with memory that is not mapped yet for what they may generate."""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.managers.schedule_policy import PrefillAdder

from kvtide.engines.sglang import current
from kvtide.engines.sglang.eras import era_of

__all__ = ["ElasticPrefillAdder"]


class ElasticPrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Admits a prompt when memory for it is mapped, and memory for its answer could be had.

    SGLang sets aside what running and admitted requests may still generate. Under kvtide that
    comes as they generate it, so it need not be mapped before.
    """

    # Slots that the prompt at hand takes now; None while none is looked at.
    _now: int | None = None
    # From 0.5.23 the counting is the budget's.
    _budget: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "memory_budget" in vars(self):
            self._budget = self.memory_budget
            kind: Any = type(self._budget)
            self._budget.__class__ = _elastic(kind)
            self._budget.adder = self

    @property
    def rem_total_tokens(self) -> Any:
        """As SGLang counts, and what could come where the prompt itself fits."""
        # Not by the class's name: SGLang puts this class there.
        total = super().rem_total_tokens
        return total if self._budget is not None else total + self.growable

    @property
    def growable(self) -> int:
        """Slots that could come for what the prompt at hand may generate, if it itself fits."""
        tide = current.tide()
        if tide is None or self._now is None or self.cur_rem_tokens <= self._now:
            return 0
        return tide.growable

    def _takes(self, req: Any) -> int:
        """Slots that all of a prompt takes, whatever this batch can take up of it."""
        done = era_of(self.tree_cache).prefix_length(req)
        tokens = len(req.full_untruncated_fill_ids) - done
        return int(self.ceil_paged_tokens(tokens)) + int(self.page_size)

    def add_chunked_req(self, req: Any) -> Any:
        """Take up more of a prompt, as much as there is memory for."""
        self._now = min(self._takes(req), self.rem_chunk_tokens + int(self.page_size))
        try:
            return super().add_chunked_req(req)
        finally:
            self._now = None

    def add_one_req(self, req: Any, has_chunked_req: bool, *args: Any, **kwargs: Any) -> Any:
        """Choose a prompt or say why not."""
        # Beside a prompt that could not be taken up whole none may begin that cannot either.
        self._now = None if has_chunked_req else self._takes(req)
        try:
            return super().add_one_req(req, has_chunked_req, *args, **kwargs)
        finally:
            self._now = None

    def add_one_req_ignore_eos(self, req: Any) -> Any:
        """Choose one whose answer's length is known."""
        # Without a radix tree SGLang plans how memory comes free; it counts with what is mapped.
        more = self.growable
        self._set_aside(-more)
        try:
            return super().add_one_req_ignore_eos(req)
        finally:
            self._set_aside(more)

    def _set_aside(self, tokens: int) -> None:
        if self._budget is not None:
            self._budget.current_offset += tokens
        else:
            self.cur_rem_token_offset += tokens


@functools.cache
def _elastic(kind: Any) -> Any:
    """The elastic kind of one of SGLang's budgets of a batch."""

    class ElasticBudget(kind):  # type: ignore[misc]
        adder: ElasticPrefillAdder

        @property
        def remaining_total(self) -> Any:
            return super().remaining_total + self.adder.growable

    return ElasticBudget
