"""SGLang's choice of prompts, with memory that is not mapped yet for what they may generate."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import PrefillAdder

from kvtide.engines.sglang import current

__all__ = ["ElasticPrefillAdder"]


class ElasticPrefillAdder(PrefillAdder):  # type: ignore[misc]
    """Admits a prompt when memory for it is mapped, and memory for its answer could be had.

    SGLang sets aside what running and admitted requests may still generate. Under kvtide that
    comes as they generate it, so it need not be mapped before.
    """

    # Slots that the prompt at hand takes now; None while none is looked at.
    _now: int | None = None

    @property
    def rem_total_tokens(self) -> Any:
        """As SGLang counts, and what could come where the prompt itself fits."""
        # Not by the class's name: SGLang puts this class there.
        total = super().rem_total_tokens
        tide = current.tide()
        if tide is None or self._now is None or self.cur_rem_tokens <= self._now:
            return total
        return total + tide.growable

    def _takes(self, req: Any) -> int:
        """Slots that a prompt takes in this batch: all of it, or as much as a chunk may have."""
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        if self.rem_chunk_tokens is not None:
            tokens = min(tokens, self.rem_chunk_tokens)
        return int(self.ceil_paged_tokens(tokens)) + int(self.page_size)

    def add_chunked_req(self, req: Any) -> Any:
        """Take up more of a prompt."""
        self._now = self._takes(req)
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
        tide = current.tide()
        more = 0 if tide is None else tide.growable
        self.cur_rem_token_offset -= more
        try:
            if self._now is not None and self.cur_rem_tokens - more < self._now:
                self._now = None
            return super().add_one_req_ignore_eos(req)
        finally:
            self.cur_rem_token_offset += more
