"""The elastic memory of one kind of slots in one rank: full attention, windows, or states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtide.engines.sglang.allocators import FreeSlots, adopt
from kvtide.engines.sglang.cached import Cached
from kvtide.engines.sglang.parts import Part
from kvtide.memory.extents import cap_for
from kvtide.observe.tally import Cause, Kind
from kvtide.pool import FreeBlocks, Growth, Pool, Reclaim, Shrink, Standing
from kvtide.pool.plans import Run
from kvtide.ranks.elastic import ElasticMemory
from kvtide.ranks.giving import Giving
from kvtide.ranks.journal import refusal_cause
from kvtide.ranks.links import DirectLink
from kvtide.ranks.ranks import Member, Ranks

__all__ = ["SlotMemory", "Slots"]

Mask = npt.NDArray[np.bool_]


class Slots:
    """What SGLang keeps of one kind of slots: the allocator's free list and the radix tree."""

    def __init__(self, allocator: Any, cached: Cached) -> None:
        self.allocator = allocator
        self._cached = cached
        self._free: FreeSlots | None = None
        self.free: FreeBlocks[Any]
        self.blocks: Sequence[Any] = ()

    def adopt(self, pool: Pool, *, shared: bool) -> None:
        """Empty the free list; from here on it holds what the pool backs, in this rank or all."""

        def usable() -> Mask:
            mask = pool.usable_mask()
            mask[0] = False
            return mask

        self._free = adopt(self.allocator, usable, shared=shared)
        # It has what elastic memory asks of free blocks; SGLang keeps them in a tensor.
        self.free = cast("FreeBlocks[Any]", self._free)

    @property
    def cached_count(self) -> int:
        """Blocks that only the radix tree holds."""
        return self._cached.count

    def cached_ids(self) -> Sequence[int]:
        """Their numbers, first to be evicted first."""
        return self._cached.ids()

    def drop_cached(self, gone: Mask) -> None:
        """Evict the blocks that are marked; what the tree frees of them is not free."""
        self._cached.drop(gone)
        self.free.withdraw(gone)


class _SharedGiving(Giving[Any]):
    """Ranks in other processes give as much of the same instance, and the same blocks."""

    # How many ranks of this server are on this device, and how many there are at all.
    ranks_on_device = 1
    ranks = 1

    def demanded(self) -> int:
        """Granules that this pool should give to others now, by this rank's ledger."""
        if self._changes.busy:
            return 0
        (seat,) = self._seats.values()
        return self._share(seat.ledger.demand(seat.instance))

    def demanded_of_running(self) -> list[int]:
        """The same of what requests hold, beyond what is idle."""
        (seat,) = self._seats.values()
        return [self._share(seat.ledger.demands(seat.instance).running_bytes)]

    def _share(self, size_bytes: int) -> int:
        return -(-size_bytes // (self._granule * self.ranks_on_device))

    def give(self, granules: int) -> bool:
        """Give so much of what no request holds; whether anything is going."""
        if self._changes.busy:
            return True
        cause = self._cause()
        if self.ranks == 1:
            reclaim = self._plan_with_splits([granules], cause)
        else:
            # A split may be carried out by one rank and not by another, and they stay in step.
            standing = self.standing()
            reclaim = self._pool.plan_shrink(standing, [granules], cached=True)
            cached = int(np.count_nonzero(reclaim.withdrawn & (standing.cached_age >= 0)))
            self._begin(reclaim, [0], cached=cached, cause=cause)
        given = sum(shrink.granules for shrink in reclaim.shrinks)
        if given < granules and not (given and any(reclaim.lacking)):
            self._keep_hoard()
        return given > 0

    def forget_hoard(self) -> None:
        """A request has ended: what was idle beside it may go now."""
        self._hoard = 0

    # Blocks that must stay for the requests that run, whether they hold them now or not.
    floor = 0

    @property
    def idle_blocks(self) -> int:
        """Blocks that others may ask for."""
        idle = super().idle_blocks
        used = self._pool.usable_count - 1 - self._idle_count
        return max(0, idle - max(0, self.floor - used))

    def standing(self) -> Standing:
        """What the allocator and the tree say; what must stay counts as in use."""
        standing = super().standing()
        lacking = self.floor - int(np.count_nonzero(standing.live)) + 1
        if lacking <= 0:
            return standing
        free, age = standing.free.copy(), standing.cached_age.copy()
        kept = np.flatnonzero(free)[:lacking]
        free[kept] = False
        age[np.flatnonzero(age >= 0)[: lacking - len(kept)]] = -1
        return dataclasses.replace(standing, free=free, cached_age=age)


class SlotMemory(ElasticMemory[Any]):
    """Elastic memory over this rank's part of one pool."""

    def __init__(self, part: Part, slots: Slots, ranks_on_device: int, ranks: int) -> None:
        uuid = part.device.info.uuid
        cap_bytes = cap_for(part.device.info.total_bytes)
        link = DirectLink(part.endpoint)
        member = Member(part.rank, 0, uuid, part.memory.account, link)
        pool = Pool([part.geometry], cap_bytes)
        slots.adopt(pool, shared=ranks > 1)
        super().__init__({uuid: part.seat}, Ranks([member]), pool, slots, cap_bytes)
        self.part = part
        self.slots = slots
        self.sharing = _SharedGiving(self.seats, self.ranks, pool, slots, self.changes)
        self.sharing.ranks_on_device, self.sharing.ranks = ranks_on_device, ranks
        self.giving = self.sharing
        granule = part.geometry.granularity_bytes
        self.adopt(
            [[Run(offset // granule, size // granule) for offset, size in part.memory.places]]
        )
        self.count_hidden()

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.circulation.free.count

    @property
    def hidden(self) -> int:
        """Blocks that have no memory."""
        return self.pool.blocks_total - self.pool.usable_count

    def count_hidden(self) -> None:
        """Tell the allocator, for its native count."""
        self.slots.allocator.hidden = self.hidden

    def attempts(self, blocks: int) -> list[int]:
        """How many blocks to try to have for so many missing: some ahead first."""
        generous = min(self.ahead_blocks, self.hidden)
        return [generous, blocks] if generous > blocks else [blocks]

    def try_growth(self, blocks: int) -> Reclaim | None:
        """Have at least so many more blocks; what came, so that it can be undone, or None."""
        growths = self.pool.plan_growth(blocks)
        if growths is None or not self._granted(growths):
            return None
        before, refused = self.pool.usable_mask(), self.changes.refused
        self.changes.grow(growths, Cause.NEED)
        self.settle()
        if self.changes.refused != refused:
            return None
        self.count_hidden()
        extents = tuple(growths[0].extents)
        return Reclaim([Shrink(extents, ())], self.pool.usable_mask() & ~before, [0])

    def _granted(self, growths: list[Growth]) -> bool:
        sizes = [g.granules * self.part.geometry.granularity_bytes for g in growths]
        refusal = self.ranks.grant(sizes)
        if refusal is not None and refusal.sample_is_stale:
            # The rank is here: it measures at once.
            self.part.memory.account.sample()
            refusal = self.ranks.grant(sizes)
        if refusal is not None:
            self.journal.note(Kind.REFUSE, refusal_cause(refusal), sizes)
        return refusal is None

    def undo_growth(self, came: Reclaim) -> None:
        """Another rank could not: give it back, nothing of it is in use."""
        self.changes.shrink(came, [0], cached=False)
        self._end_giving(going=True)

    def give(self, granules: int) -> bool:
        """Give so much to others; whether anything is going."""
        going = self.sharing.give(granules)
        if going:
            # What is split must have moved before more work is queued that writes there.
            self.part.endpoint.step(None, runs=False)
        return self._end_giving(going=going)

    def give_free(self) -> bool:
        """Give back the extents that hold nothing; whether there were any."""
        return self._end_giving(going=self.trim())

    def _end_giving(self, *, going: bool) -> bool:
        if going:
            self.settle()
            self.count_hidden()
        return going

    def bytes_for(self, blocks: int) -> int:
        """What so many more blocks would take."""
        growths = self.pool.plan_growth(blocks)
        granule = self.part.geometry.granularity_bytes
        return sum(g.granules for g in growths) * granule if growths else 0
