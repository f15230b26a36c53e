"""Memory that comes before it is missed: for the coming steps, and for requests yet to come."""

from __future__ import annotations

import math
import time
from typing import Any

from kvtide.engines.vllm.need import Need
from kvtide.pool import FreeBlocks
from kvtide.ranks.growing import GrowingMemory

__all__ = ["Foresight"]

# While memory is not to be had: the pause between two tries.
_PROBE_SECONDS = 0.25


class Foresight:
    """Grows ahead of need, and wishes for what of it cannot be had.

    Parameters
    ----------
    scheduler
        vLLM's.
    memory, free
        Of its engine.
    need
        What the coming steps need.
    watermark
        The share of its usable blocks that vLLM leaves free where another request is admitted.

    Attributes
    ----------
    watermark
        As it was given.
    wishes
        Whether something is wished for that no step has missed.
    """

    def __init__(
        self,
        scheduler: Any,
        memory: GrowingMemory[Any],
        free: FreeBlocks[Any],
        need: Need,
        watermark: float,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._free = free
        self._need = need
        self.watermark = watermark
        self.wishes = False
        # Before these moments no further try, unless something was freed: to have what the next
        # step needs, and what some do.
        self._near_at = self._far_at = 0.0

    def hurry(self) -> None:
        """Something was freed: what was refused may be had now."""
        self._near_at = self._far_at = 0.0

    def wanted_blocks(self) -> int:
        """Blocks that are worth having free."""
        return self._ahead()[1] + self._for_those_who_come()

    def grow(self, most: int | None = None) -> None:
        """Before a step: have what the coming ones need, and some for requests yet to come.

        `most` is what they cannot need more than, where that is known.
        """
        if most is not None and most <= self._free_soon:
            self.wishes = False
        elif time.monotonic() >= self._near_at:
            near, far = self._ahead()
            self._grow_ahead(near, far)
            self._grow_spare(far)

    def _ahead(self) -> tuple[int, int]:
        """Blocks for the next step and for some, with what vLLM's watermark wants left free.

        That is a share of all that is usable once it has come, and counts where another request is
        admitted beside those that run.
        """
        near, far = self._need.ahead()
        if self.watermark and self._scheduler.running and self._need.heads():
            near, far = self._above_watermark(near), self._above_watermark(far)
        return near, far

    @property
    def _free_soon(self) -> int:
        """Blocks that are free, and those that are under way."""
        return self._free.count + self._memory.coming_count

    def _above_watermark(self, blocks: int) -> int:
        """How many have to be free so that so many may be taken: what comes raises it as well."""
        pool, free, share = self._memory.pool, self._free_soon, self.watermark
        usable = pool.usable_count + self._memory.coming_count
        more = math.ceil((blocks - free + share * usable) / (1 - share))
        return max(blocks, free + min(more, pool.blocks_total - usable))

    def _grow_ahead(self, near: int, far: int) -> None:
        """Have what the coming steps need; where none is left, ask for it before it is missed.

        Some steps' prompts at once: what others have to give up, or other processes to map, is not
        there before the next step, and prompts would wait for it at every step. A first step waits
        for its own alone where that comes at once: the rest comes while it computes.
        """
        memory, now = self._memory, time.monotonic()
        if far <= self._free_soon:
            self.wishes = False
            return
        lacking = near - self._free_soon
        refused = False
        if memory.ranks.direct and not self._scheduler.running:
            if lacking <= 0 or memory.grow(lacking):
                return
            refused = True
        if now >= self._far_at:
            self.wishes = False
            if not refused and memory.grow(far - self._free_soon):
                return
            self._far_at = now + _PROBE_SECONDS
        elif lacking <= 0:
            return
        if lacking > 0 and (refused or not memory.grow(lacking)):
            self._near_at = now + _PROBE_SECONDS
        # A cache of one's own goes before that of others, and what is under way does too.
        there = memory.free_count + memory.coming_count
        if far > there:
            self.wishes = True
            memory.wish_ahead(far - there, max(0, near - there))

    def _for_those_who_come(self) -> int:
        """Blocks that are worth having for requests that are not there yet.

        Where several come one after the other, and what ranks elsewhere map is a step late: what
        one step can take up.
        """
        several_come = not self._memory.ranks.direct and self._need.several_wait()
        return self._need.batch_blocks if several_come else 0

    def _grow_spare(self, far: int) -> None:
        """Have that there before them, where memory is free."""
        spare = self._free_soon - far
        if spare >= 0 and (blocks := self._for_those_who_come()):
            self._memory.grow_spare(blocks, spare)
