"""The elastic memory of one engine: what it has, when it gives back, what it tells others.

Used by the engine's scheduler, on its own thread. Between two calls of `settle` the engine's count
of free blocks only changes by its own doing, so what it has checked it can have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtide.ledger import State
from kvtide.memory.extents import ahead_bytes
from kvtide.observe.tally import Cause, Kind
from kvtide.pool import Block, Growth, Pool, Standing
from kvtide.pool.plans import Run
from kvtide.ranks.changes import Changes, Circulation
from kvtide.ranks.figures import Figures
from kvtide.ranks.giving import Giving
from kvtide.ranks.journal import Journal
from kvtide.ranks.patience import Backoff, Surplus
from kvtide.ranks.ranks import Ranks
from kvtide.ranks.seat import Seat

__all__ = ["Circulation", "ElasticMemory"]

B = TypeVar("B", bound=Block)


class ElasticMemory(Generic[B]):
    """Pool, ranks and ledger of one engine, moved together. How it grows is up to who derives.

    Parameters
    ----------
    seats
        By device UUID.
    ranks, pool
        Of the engine; the pool's shapes are those of the ranks' members.
    circulation
        The engine's bookkeeping.
    extent_cap_bytes
        The largest extent.
    clock
        Monotonic seconds.

    Attributes
    ----------
    trim_soon
        The engine asks to have what holds nothing given back at the next step.
    """

    def __init__(
        self,
        seats: dict[str, Seat],
        ranks: Ranks,
        pool: Pool,
        circulation: Circulation[B],
        extent_cap_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seats = seats
        self.ranks = ranks
        self.pool = pool
        self.circulation = circulation
        self._block_bytes = [shape.geometry.block_bytes for shape in pool.shapes]
        self.journal = Journal(seats, ranks.members, self._block_bytes)
        self.changes = Changes(ranks, pool, circulation, self.journal)
        self.giving = Giving(seats, ranks, pool, circulation, self.changes, clock)
        self._clock = clock
        self._granule = pool.shapes[0].granularity_bytes
        self._cap_bytes = extent_cap_bytes
        self.figures = Figures(ranks, pool, circulation, self.changes)
        self._backoff = Backoff()
        self._surplus = Surplus()
        self._state: State | None = None
        self.trim_soon = False

    def adopt(self, runs_of_shape: Sequence[Sequence[Run]]) -> None:
        """Take over what the ranks have mapped already, for block 0: the null block."""
        growths = [Growth(tuple(runs), sum(r.granules for r in runs), 1) for runs in runs_of_shape]
        # What the null block lies in never goes.
        self.figures.pinned_bytes = [g.granules * self._granule for g in growths]
        self.journal.note(Kind.GROW, Cause.START, self.figures.pinned_bytes)
        self.pool.begin_growth(growths)
        (first, *others) = self.pool.confirm_growth(growths)
        assert first[0] == 0
        self.changes.circulate([(1, first[1]), *others])

    # Counting ----------------------------------------------------------------------------------

    @property
    def free_count(self) -> int:
        """Blocks that the engine can have now, without or with eviction from its cache."""
        return self.circulation.free.count + self.circulation.cached_count

    @property
    def used_count(self) -> int:
        """Usable blocks that requests hold; the null block is not counted."""
        return self.pool.usable_count - self.free_count - 1

    @property
    def pending(self) -> bool:
        """Whether a change has been ordered that not all ranks have confirmed."""
        return self.ranks.pending

    @property
    def growing(self) -> bool:
        """Whether memory is coming."""
        return self.changes.growing

    @property
    def coming_count(self) -> int:
        """Blocks that ranks were ordered to back, and did not confirm yet."""
        return self.changes.coming_count

    @property
    def ahead_blocks(self) -> int:
        """Blocks that are worth having beyond what is needed, by what is mapped."""
        return ahead_bytes(self.pool.mapped_bytes, self._cap_bytes) // sum(self._block_bytes)

    def hurry(self) -> None:
        """Something was freed: a device that had no memory for a grant may have it now."""
        self._backoff.hurry()

    # Giving back -------------------------------------------------------------------------------

    @property
    def owing(self) -> bool:
        """Whether others, a limit, or somebody who steers may demand something; cheap."""
        return any(seat.ledger.is_owing(seat.instance) for seat in self.seats.values())

    def trim(self) -> bool:
        """Give back the extents that hold nothing; whether there were any."""
        self.trim_soon = False
        return self._gone(self.giving.all_free())

    def regroup(self) -> bool:
        """Give back all that no request holds, to have as much again where it lies together.

        For an engine of which nothing can run although what it holds would do: its blocks lie
        apart, in granules of which each backs a part of them only.
        """
        return self._gone(self.giving.all_idle())

    def yield_to_others(self) -> bool:
        """Give back what others wish for, or a limit demands, of what no request holds.

        Returns
        -------
        bool
            Whether to ask again: something is going, or has to end before more can.
        """
        return self._gone(self.giving.to_others())

    def give_surplus(self, needed: Callable[[], int] = lambda: 0) -> bool:
        """Give back what was free for some seconds, beyond what is grown ahead.

        For every step of an engine that is not idle: once a second it looks, else it compares.

        Parameters
        ----------
        needed
            Blocks that coming steps need free, and would have grown again; asked only where
            something could go.

        Returns
        -------
        bool
            Whether anything was given back.
        """
        unused = self._surplus.see(self.circulation.free.count, self._clock())
        if not unused:
            return False
        # Less than the next growth ahead would bring back is not worth its way.
        spare = unused - self.ahead_blocks
        if spare < self.ahead_blocks:
            return False
        spare = min(spare, self.circulation.free.count - needed())
        if spare < self.ahead_blocks or not self._gone(self.giving.surplus(spare)):
            return False
        self._surplus.forget()
        return True

    def _gone(self, going: bool) -> bool:
        if going and self.ranks.direct:
            self.settle()
        return going

    def standing(self) -> Standing:
        """What the engine says of its blocks now."""
        return self.giving.standing()

    # Refunds -----------------------------------------------------------------------------------

    @property
    def owes_refunds(self) -> bool:
        """Whether refunds are due for which a ledger was too busy."""
        return any(seat.ledger.owing for seat in self.seats.values())

    def pay(self) -> None:
        """Make them: an idle engine makes no other change, and others lack what it holds."""
        for seat in self.seats.values():
            if seat.ledger.owing:
                seat.ledger.pay()

    # Outcomes ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take what the ranks have confirmed by now into account. Never waits.

        Raises
        ------
        RankLostError
            A rank has ended, or has not answered for too long.
        """
        made, refused = self.changes.made, self.changes.refused
        if not self.changes.settle():
            return
        while self.ranks.direct and self.ranks.pending and self.changes.settle():
            # What was refused here is undone at once.
            continue
        if self.changes.refused > refused:
            self._backoff.failed(self._clock())
        elif self.changes.made > made:
            self._backoff.succeeded()
        self.publish()

    # For observers -----------------------------------------------------------------------------

    def show(self, state: State) -> None:
        """Tell what the engine does, and publish the figures of the pool."""
        if state is not self._state:
            self._state = state
            self.journal.count_now()
            for seat in self.seats.values():
                seat.instance.set_state(state)
        self.publish()

    def publish(self) -> None:
        """Publish the figures of the pool: others ask for idle memory by them."""
        self.figures.publish(self.giving)
        self.journal.count_soon()

    def close(self) -> None:
        """Let go of the ranks."""
        self.ranks.close()
        self.journal.close()
