"""What an engine gives back: to others who wish for it, when it idles, and what it never uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from kvtide.observe.tally import CAUSE_NAMES, Cause, Kind
from kvtide.pool import Block, Pool, Reclaim, Splits, Standing
from kvtide.ranks.changes import Changes, Circulation
from kvtide.ranks.patience import Backoff
from kvtide.ranks.ranks import Ranks
from kvtide.ranks.seat import Seat

__all__ = ["Giving"]

B = TypeVar("B", bound=Block)

_HOARD_SECONDS = 0.5


class Giving(Generic[B]):
    """Chooses what goes and has it go. One round at a time, and none while memory is coming."""

    def __init__(
        self,
        seats: Mapping[str, Seat],
        ranks: Ranks,
        pool: Pool,
        circulation: Circulation[B],
        changes: Changes[B],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seats = seats
        self._ranks = ranks
        self._pool = pool
        self._circulation = circulation
        self._changes = changes
        self._granule = pool.shapes[0].granularity_bytes
        self._members_on = {
            uuid: sum(m.device_uuid == uuid for m in ranks.members) for uuid in seats
        }
        # Idle blocks that could not be given back when all was asked for: they share granules
        # with others that are in use.
        self._hoard = 0
        self._hoard_used, self._hoard_until = 0, 0.0
        self._clock = clock
        # By device: trims of which all is going.
        self._trimmed: dict[str, int] = {}
        # After a split that could not be made: until then only whole extents go.
        self._backoff = Backoff()
        self._unsplit = 0

    def to_others(self) -> bool:
        """Give what others wish for, or a limit demands, of what no request holds.

        Returns
        -------
        bool
            Whether to ask again: something is going, or has to end before more can.
        """
        if self._changes.busy:
            return True
        self._end_trims()
        wanted = self._granules(
            {u: seat.ledger.demands(seat.instance).idle_bytes for u, seat in self._seats.items()}
        )
        if not any(wanted):
            return False
        reclaim = self._plan_with_splits(wanted, self._cause())
        given = [shrink.granules for shrink in reclaim.shrinks]
        short = any(g < w for g, w in zip(given, wanted, strict=True))
        # What lacked a transient may go in the next round.
        if short and self._may_split() and not (any(given) and any(reclaim.lacking)):
            self._keep_hoard()
        if not (any(given) and any(reclaim.lacking)):
            self._note_trims()
        return any(given)

    def _note_trims(self) -> None:
        """All that may go for a trim is going: by the next round it is done."""
        for uuid, seat in self._seats.items():
            asked = seat.ledger.trim_asked(seat.instance)
            if asked is not None and not seat.ledger.demands(seat.instance).running_bytes:
                self._trimmed[uuid] = asked

    def _end_trims(self) -> None:
        """What has been done once is not asked again of what has come since."""
        while self._trimmed:
            uuid, asked = self._trimmed.popitem()
            seat = self._seats[uuid]
            if seat.ledger.trim_asked(seat.instance) is not None:
                seat.ledger.end_trim(seat.instance, asked)

    def demanded_of_running(self) -> list[int]:
        """Granules of each shape that others may have although running requests hold them."""
        return self._granules(
            {u: seat.ledger.demands(seat.instance).running_bytes for u, seat in self._seats.items()}
        )

    def preempts(self, requests: int, blocks: int) -> None:
        """So many requests are about to be preempted for that, which hold these blocks alone."""
        of_shape = [blocks * shape.geometry.block_bytes for shape in self._pool.shapes]
        self._changes.journal.note(Kind.PREEMPT, self._cause(), of_shape, requests)

    def nothing_more(self) -> None:
        """No request runs whose memory could go: whoever asked for it is done."""
        for seat in self._seats.values():
            if not seat.ledger.demands(seat.instance).idle_bytes:
                seat.ledger.end_trim(seat.instance)

    def _granules(self, of_device: Mapping[str, int]) -> list[int]:
        wanted = [0] * len(self._pool.shapes)
        for m in self._ranks.members:
            share_bytes = self._granule * self._members_on[m.device_uuid]
            granules = -(-of_device[m.device_uuid] // share_bytes)
            wanted[m.shape] = max(wanted[m.shape], granules)
        return wanted

    def all_free(self) -> bool:
        """Give every extent that holds nothing; whether there were any."""
        return self._whole([None] * len(self._pool.shapes), at_most=False, cause=Cause.IDLE)

    def all_idle(self) -> bool:
        """Give all that no request holds, the prefix cache too; whether anything goes."""
        if self._changes.busy:
            return False
        wanted = [shape.mapped_bytes // self._granule for shape in self._pool.shapes]
        reclaim = self._plan_with_splits(wanted, Cause.LIMIT)
        return any(shrink.granules for shrink in reclaim.shrinks)

    def surplus(self, blocks: int) -> bool:
        """Give extents that hold nothing, at most what these blocks take; whether any."""
        wanted = [
            blocks * shape.geometry.block_bytes // self._granule for shape in self._pool.shapes
        ]
        return any(wanted) and self._whole(wanted, at_most=True, cause=Cause.SURPLUS)

    @property
    def idle_blocks(self) -> int:
        """Blocks that others may ask for."""
        idle = self._idle_count
        used = self._pool.usable_count - idle
        if self._hoard and (used < self._hoard_used or self._clock() >= self._hoard_until):
            # Others that were in use have come free since, or may have: it may go now.
            self._hoard = 0
        self._hoard = min(self._hoard, idle)
        return idle - self._hoard

    def _keep_hoard(self) -> None:
        """What is idle now cannot go, for the while."""
        self._hoard = self._idle_count
        self._hoard_used = self._pool.usable_count - self._hoard
        self._hoard_until = self._clock() + _HOARD_SECONDS

    @property
    def _idle_count(self) -> int:
        return self._circulation.free.count + self._circulation.cached_count

    def _cause(self) -> int:
        """Why something is given, for observers."""
        found = (seat.ledger.reason(seat.instance) for seat in self._seats.values())
        reason = next((reason for reason in found if reason is not None), None)
        # None: whoever wished has what it wanted, since this was asked.
        return Cause.OTHERS if reason is None else CAUSE_NAMES.index(reason)

    def _whole(self, wanted: Sequence[int | None], *, at_most: bool, cause: int) -> bool:
        if self._changes.busy:
            return False
        reclaim = self._pool.plan_shrink(self.standing(), wanted, cached=False, at_most=at_most)
        return self._begin(reclaim, [0] * len(wanted), cached=0, cause=cause)

    def _may_split(self) -> bool:
        now = self._clock()
        if self._changes.unsplit > self._unsplit:
            self._unsplit = self._changes.unsplit
            self._backoff.failed(now)
        return self._backoff.ready(now)

    def _plan_with_splits(self, wanted: Sequence[int], cause: int) -> Reclaim:
        """Choose and begin, whole extents first.

        What a split holds twice comes out of what goes before it. For the first one that may be
        too little: then it is granted on top, or where the budget has no room either, carried.
        """
        standing, nothing = self.standing(), [0] * len(wanted)
        transient = nothing
        plan = self._pool.plan_shrink
        splits = Splits(nothing, staged=False) if self._may_split() else None
        reclaim = plan(standing, wanted, cached=True, splits=splits)
        if any(reclaim.lacking):
            staged = self._ranks.grant([g * self._granule for g in reclaim.lacking]) is not None
            if not staged:
                transient = reclaim.lacking
            reclaim = plan(standing, wanted, cached=True, splits=Splits(transient, staged=staged))
        cached = int(np.count_nonzero(reclaim.withdrawn & (standing.cached_age >= 0)))
        begun = self._begin(reclaim, transient, cached=cached, cause=cause)
        assert begun or not any(transient)
        return reclaim

    def _begin(
        self, reclaim: Reclaim, transient: Sequence[int], *, cached: int, cause: int
    ) -> bool:
        """`cached` is how many of the blocks that go are the prefix cache's."""
        shrinks = reclaim.shrinks
        if not any(shrink.granules for shrink in shrinks):
            return False
        size, journal = self._granule, self._changes.journal
        journal.note(Kind.SHRINK, cause, [shrink.granules * size for shrink in shrinks])
        splits = sum(len(shrink.splits) for shrink in shrinks)
        if splits:
            parted = [sum(s.extent.granules for s in shrink.splits) * size for shrink in shrinks]
            journal.note(Kind.SPLIT, cause, parted, splits)
        if cached:
            journal.evicted(cause, cached)
        self._changes.shrink(reclaim, transient, cached=bool(cached))
        return True

    def standing(self) -> Standing:
        """What the engine says of its blocks now."""
        total = self._pool.blocks_total
        age = np.full(total, -1, np.int64)
        cached = self._circulation.cached_ids()
        age[np.fromiter(cached, np.int64, len(cached))] = np.arange(len(cached))
        return Standing(self._pool.usable_mask(), self._circulation.free.mask(total), age)
