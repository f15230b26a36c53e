"""The elastic memory of one engine: when it grows, what it gives back, and what is in circulation.

Used by the engine's scheduler, on its own thread. `begin_step` comes before the engine schedules,
`end_step` after it; between the two the engine's count of free blocks only changes by its own
doing, so what it has checked it can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.ledger import Instance, Ledger, PoolFigures, Refusal, State
from kvtide.pool import Block, FreeBlocks, Growth, Pool, Shrink, Standing
from kvtide.pool.plans import Run
from kvtide.ranks.messages import Place
from kvtide.ranks.ranks import Outcome, Ranks

__all__ = ["Circulation", "ElasticMemory", "Seat"]

B = TypeVar("B", bound=Block)
Mask = npt.NDArray[np.bool_]

# Refunds of smaller extents are batched below this; larger ones are refunded alone.
_REFUND_BYTES = 64 << 20
# Grown ahead: as much as this share of what is mapped, but at least an extent of this size.
_AHEAD_SHARE = 20
_AHEAD_BYTES = 32 << 20


class Circulation(Protocol[B]):
    """The engine's own bookkeeping of its blocks, as far as memory coming and going needs it."""

    free: FreeBlocks[B]
    blocks: Sequence[B]

    @property
    def cached_count(self) -> int:
        """Blocks that only the prefix cache holds."""

    def cached_ids(self) -> Sequence[int]:
        """Their numbers, first to be evicted first."""

    def drop_cached(self, gone: Mask) -> None:
        """Evict the cached blocks that are marked; they are out of circulation."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The engine's place on one device: its ledger and its record there."""

    ledger: Ledger
    instance: Instance


@dataclass(slots=True)
class _Growing:
    growths: list[Growth]
    bytes_of_shape: list[int]


@dataclass(slots=True)
class _Shrinking:
    shrinks: list[Shrink]
    refund_of_shape: list[int]


class ElasticMemory(Generic[B]):
    """Pool, ranks and ledger of one engine, moved together.

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
    """

    def __init__(
        self,
        seats: dict[str, Seat],
        ranks: Ranks,
        pool: Pool,
        circulation: Circulation[B],
        extent_cap_bytes: int,
    ) -> None:
        self.seats = seats
        self.ranks = ranks
        self.pool = pool
        self.circulation = circulation
        self._granule = pool.shapes[0].granularity_bytes
        self._ahead_bytes = min(_AHEAD_BYTES, extent_cap_bytes)
        self._block_bytes = [shape.geometry.block_bytes for shape in pool.shapes]
        self._growing: dict[int, _Growing] = {}
        self._shrinking: dict[int, _Shrinking] = {}
        self._undoing: dict[int, _Growing] = {}
        self._shape_devices = [
            {m.device_uuid for m in ranks.members if m.shape == shape}
            for shape in range(len(pool.shapes))
        ]
        # What the null block lies in never goes.
        self._pinned_bytes = [0] * len(pool.shapes)
        self._state: State | None = None
        # A growth that nothing but other engines' memory could serve was refused.
        self.wishing = False
        # The engine asks to have what holds nothing given back at the next step.
        self.trim_soon = False
        self.refusals = 0

    def adopt(self, runs_of_shape: Sequence[Sequence[Run]]) -> None:
        """Take over what the ranks have mapped already, for block 0: the null block."""
        growths = [Growth(tuple(runs), sum(r.granules for r in runs)) for runs in runs_of_shape]
        self._pinned_bytes = [g.granules * self._granule for g in growths]
        self.pool.begin_growth(growths)
        (first, *others) = self.pool.confirm_growth(growths)
        assert first[0] == 0
        self._circulate([(1, first[1]), *others])

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
        return bool(self._growing)

    # Growth ------------------------------------------------------------------------------------

    def grow(self, blocks: int) -> bool:
        """Have at least so many more blocks come, and some ahead; False when it was refused."""
        ahead = max(self._ahead_bytes, self.pool.mapped_bytes // _AHEAD_SHARE)
        generous = ahead // sum(self._block_bytes)
        if generous > blocks and self._grow(generous) is None:
            return True
        return self._grow(blocks) is None

    def grow_for(self, blocks: int, desired: int) -> bool:
        """Have `desired` more blocks come, or at least the `blocks` without which nothing goes on.

        If even these are refused, a wish for the desired ones is registered; not so where no more
        can ever come.

        Returns
        -------
        bool
            Whether some are coming.
        """
        if self._growing:
            return True
        if self.pool.plan_growth(1) is None:
            # Every block there may ever be is backed: the engine has to make do with them.
            self.end_wish()
            return False
        refusal = self._grow(desired) if desired > blocks else None
        if desired <= blocks or refusal is not None:
            refusal = self._grow(blocks)
        if refusal is None:
            return True
        self.refusals += 1
        self._wish(desired)
        if refusal.sample_is_stale and not self.ranks.pending:
            self.ranks.sample(len(self.pool.shapes))
        return False

    def _grow(self, blocks: int) -> Refusal | None:
        growths = self.pool.plan_growth(blocks)
        if growths is None:
            return Refusal("limit", asked_bytes=blocks, available_bytes=0, sample_is_stale=False)
        bytes_of_shape = [g.granules * self._granule for g in growths]
        refusal = self.ranks.grant(bytes_of_shape)
        if refusal is not None:
            return refusal
        self.pool.begin_growth(growths)
        sequence = self.ranks.grow([self._places(g.extents) for g in growths])
        self._growing[sequence] = _Growing(growths, bytes_of_shape)
        if self.ranks.direct:
            self.settle()
        return None

    def _wish(self, blocks: int) -> None:
        growths = self.pool.plan_growth(blocks)
        assert growths is not None
        for uuid, seat in self.seats.items():
            seat.instance.wish(
                sum(
                    growths[m.shape].granules * self._granule
                    for m in self.ranks.members
                    if m.device_uuid == uuid
                )
            )
        self.wishing = True

    def end_wish(self) -> None:
        """What was wished for is no longer needed, or has come."""
        if self.wishing:
            self.wishing = False
            for seat in self.seats.values():
                seat.instance.wish(0)

    # Giving back -------------------------------------------------------------------------------

    def trim(self) -> bool:
        """Give back the extents that hold nothing; whether there were any."""
        self.trim_soon = False
        return self._give_back([None] * len(self.pool.shapes), cached=False, split=False)

    def yield_to_others(self) -> bool:
        """Give back what others wish for, or a limit demands, of what no request holds.

        Returns
        -------
        bool
            Whether anything was given back.
        """
        if self._growing or self._shrinking:
            return False
        demand_bytes = {u: seat.ledger.demand(seat.instance) for u, seat in self.seats.items()}
        wanted: list[int | None] = []
        for devices in self._shape_devices:
            most_bytes = max(demand_bytes[uuid] for uuid in devices)
            ranks = max(
                1, sum(m.device_uuid in devices for m in self.ranks.members) // len(devices)
            )
            wanted.append(-(-most_bytes // (self._granule * ranks)))
        if not any(wanted):
            return False
        return self._give_back(wanted, cached=True, split=True)

    def _give_back(self, wanted: Sequence[int | None], *, cached: bool, split: bool) -> bool:
        if self._growing or self._shrinking:
            return False
        standing = self.standing()
        # What a split holds twice must come out of what goes before it in the same order.
        planned = self.pool.plan_shrink(
            standing, wanted, cached=cached, split_transient_granules=0 if split else -1
        )
        if planned is None:
            return False
        shrinks, withdrawn = planned
        self.circulation.free.withdraw(withdrawn)
        if np.any(withdrawn & (standing.cached_age >= 0)):
            self.circulation.drop_cached(withdrawn)
        for number, part in enumerate(self._batches(shrinks)):
            self.pool.begin_shrink(part, withdrawn if number == 0 else np.zeros_like(withdrawn))
            sequence = self.ranks.shrink(
                [self._places(s.extents) for s in part],
                [
                    tuple(
                        (self._place(split_.extent), self._places(split_.keep))
                        for split_ in s.splits
                    )
                    for s in part
                ],
            )
            refund = [s.granules * self._granule for s in part]
            self._shrinking[sequence] = _Shrinking(part, refund)
        if self.ranks.direct:
            self.settle()
        return True

    def _batches(self, shrinks: list[Shrink]) -> list[list[Shrink]]:
        """Cut plans into orders that are refunded one by one."""
        if any(s.splits for s in shrinks):
            # The whole extents' memory carries the splits: it is withheld until they are done.
            return [shrinks]
        parts = [self._parts(s) for s in shrinks]
        longest = max(len(p) for p in parts)
        nothing = Shrink((), (), 0, 0)
        return [[p[i] if i < len(p) else nothing for p in parts] for i in range(longest)]

    def _parts(self, shrink: Shrink) -> list[Shrink]:
        limit = _REFUND_BYTES // self._granule
        parts: list[Shrink] = []
        batch: list[Run] = []
        for run in shrink.extents:
            if batch and sum(r.granules for r in batch) + run.granules > limit:
                parts.append(Shrink(tuple(batch), (), sum(r.granules for r in batch), 0))
                batch = []
            batch.append(run)
        parts.append(Shrink(tuple(batch), (), sum(r.granules for r in batch), 0))
        return parts

    def standing(self) -> Standing:
        """What the engine says of its blocks now."""
        total = self.pool.blocks_total
        age = np.full(total, -1, np.int64)
        cached = self.circulation.cached_ids()
        age[np.fromiter(cached, np.int64, len(cached))] = np.arange(len(cached))
        return Standing(self.pool.usable_mask(), self.circulation.free.mask(total), age)

    # Outcomes ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take what the ranks have confirmed by now into account. Never waits."""
        outcomes = self.ranks.receive()
        for outcome in outcomes:
            sequence = outcome.orders[0].sequence
            if (growing := self._growing.pop(sequence, None)) is not None:
                self._end_growth(growing, outcome)
            elif (shrinking := self._shrinking.pop(sequence, None)) is not None:
                self._end_shrink(shrinking, outcome)
            elif (undoing := self._undoing.pop(sequence, None)) is not None:
                self.pool.abort_growth(undoing.growths)
                self.ranks.refund(undoing.bytes_of_shape)
        if outcomes:
            self.publish()

    def _end_growth(self, growing: _Growing, outcome: Outcome) -> None:
        if outcome.done:
            self._circulate(self.pool.confirm_growth(growing.growths))
            return
        mapped = {rank for rank, answer in outcome.answers.items() if answer.done}
        if mapped:
            sequence = self.ranks.undo_growth(outcome.orders, mapped)
            self._undoing[sequence] = growing
        else:
            self.pool.abort_growth(growing.growths)
            self.ranks.refund(growing.bytes_of_shape)

    def _circulate(self, spans: Sequence[tuple[int, int]]) -> None:
        free, blocks = self.circulation.free, self.circulation.blocks
        for low, high in spans:
            free.give_span(blocks, low, high)

    def _end_shrink(self, shrinking: _Shrinking, outcome: Outcome) -> None:
        self.pool.confirm_shrink(shrinking.shrinks)
        self.ranks.refund(shrinking.refund_of_shape)

    # For observers -----------------------------------------------------------------------------

    def show(self, state: State) -> None:
        """Tell what the engine does, and publish the figures of the pool."""
        if state is not self._state:
            self._state = state
            for seat in self.seats.values():
                seat.instance.set_state(state)
        self.publish()

    def publish(self) -> None:
        """Publish the figures of the pool: others ask for idle memory by them."""
        free, cached = self.circulation.free.count, self.circulation.cached_count
        usable = self.pool.usable_count
        used = max(0, usable - free - cached)
        for member in self.ranks.members:
            shape = self.pool.shapes[member.shape]
            idle_bytes = (free + cached) * self._block_bytes[member.shape]
            member.account.publish(
                PoolFigures(
                    blocks_mapped=usable,
                    blocks_used=used,
                    blocks_cached=cached,
                    extents=len(shape.mapped),
                    idle_bytes=min(idle_bytes, shape.mapped_bytes),
                    releasing_bytes=sum(
                        s.refund_of_shape[member.shape] for s in self._shrinking.values()
                    ),
                    pinned_bytes=self._pinned_bytes[member.shape],
                )
            )

    def _place(self, run: Run) -> Place:
        return (run.first * self._granule, run.granules * self._granule)

    def _places(self, runs: Sequence[Run]) -> tuple[Place, ...]:
        return tuple(self._place(run) for run in runs)

    def close(self) -> None:
        """Let go of the ranks."""
        self.ranks.close()
