"""The changes that ranks were ordered to make: begun, and ended as all of them have answered.

A growth that some ranks made and others could not is undone where it was made. What a device did
not take back stays charged; where it is still mapped nothing is mapped again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.observe.tally import Cause, Kind
from kvtide.pool import Block, FreeBlocks, Growth, Pool, Reclaim, Run, Shrink, Split
from kvtide.pool.plans import Span
from kvtide.ranks.journal import Journal
from kvtide.ranks.places import parting, places, runs
from kvtide.ranks.ranks import Member, Outcome, Ranks

__all__ = ["Changes", "Circulation"]

B = TypeVar("B", bound=Block)
Mask = npt.NDArray[np.bool_]


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
class _Growing:
    """`undoing`: some ranks could not, and the others are giving it back."""

    growths: list[Growth]
    cause: int
    undoing: bool = False


@dataclass(frozen=True, slots=True)
class _Shrinking:
    """`transient`: granules of each shape that were granted on top, for the splits alone."""

    shrinks: list[Shrink]
    transient: Sequence[int]


class Changes(Generic[B]):
    """What is coming and going, over one pool and its ranks.

    Attributes
    ----------
    made, refused
        Growths that all ranks made, and those that some could not although they were granted.
    unsplit
        Splits that some ranks could not make.
    coming_count
        Blocks of the growths that are under way.
    quarantined_bytes
        By rank: what its device did not take back, or holds for an extent that could not be split.
    """

    def __init__(
        self, ranks: Ranks, pool: Pool, circulation: Circulation[B], journal: Journal
    ) -> None:
        self.journal = journal
        self._ranks = ranks
        self._pool = pool
        self._circulation = circulation
        self._granule = pool.shapes[0].granularity_bytes
        self._growing: dict[int, _Growing] = {}
        self._shrinking: dict[int, _Shrinking] = {}
        # Of each shape, where memory is stuck. Most often empty.
        self._blocked: list[set[Run]] = [set() for _ in pool.shapes]
        self.made = self.refused = self.unsplit = self.coming_count = 0
        # Told of what every rank has mapped.
        self.came: Callable[[Sequence[Growth]], None] = lambda growths: None
        self.quarantined_bytes = {member.rank: 0 for member in ranks.members}

    @property
    def growing(self) -> bool:
        """Whether memory is coming."""
        return bool(self._growing) and not all(g.undoing for g in self._growing.values())

    @property
    def busy(self) -> bool:
        """Whether memory is coming or going."""
        return bool(self._growing or self._shrinking)

    def releasing_bytes(self, shape: int) -> int:
        """What a rank of this shape has begun to give back, and is still charged for."""
        if not self._shrinking:
            return 0
        granules = sum(
            s.shrinks[shape].granules + s.transient[shape] for s in self._shrinking.values()
        )
        return granules * self._granule

    # Beginning ---------------------------------------------------------------------------------

    def grow(self, growths: list[Growth], cause: int) -> None:
        """Have all ranks map what was granted."""
        self._pool.begin_growth(growths)
        sequence = self._ranks.grow([places(g.extents, self._granule) for g in growths])
        self._growing[sequence] = _Growing(growths, cause)
        self.coming_count += growths[0].blocks

    def shrink(self, reclaim: Reclaim, transient: Sequence[int], *, cached: bool) -> None:
        """Take what was chosen out of circulation, and have all ranks give it back.

        `transient` was granted for the splits on top, in granules of each shape, and `cached`
        says that some of it is the prefix cache's.
        """
        self._circulation.free.withdraw(reclaim.withdrawn)
        if cached:
            self._circulation.drop_cached(reclaim.withdrawn)
        shrinks, size = reclaim.shrinks, self._granule
        self._pool.begin_shrink(shrinks, reclaim.withdrawn)
        sequence = self._ranks.shrink(
            [places(shrink.extents, size) for shrink in shrinks],
            [tuple(parting(split, size) for split in shrink.splits) for shrink in shrinks],
        )
        self._shrinking[sequence] = _Shrinking(shrinks, transient)

    def circulate(self, spans: Sequence[Span]) -> None:
        """Let the engine have these blocks."""
        free, blocks = self._circulation.free, self._circulation.blocks
        for low, high in spans:
            free.give_span(blocks, low, high)

    # Ending ------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Take what the ranks have confirmed by now into account; whether it was anything."""
        outcomes = self._ranks.receive()
        for outcome in outcomes:
            if (growing := self._growing.pop(outcome.sequence, None)) is not None:
                self._end_growth(growing, outcome)
            elif (shrinking := self._shrinking.pop(outcome.sequence, None)) is not None:
                self._end_shrink(shrinking, outcome)
        return bool(outcomes)

    def _end_growth(self, growing: _Growing, outcome: Outcome) -> None:
        growths = growing.growths
        if not growing.undoing:
            self.coming_count -= growths[0].blocks
        of_shape = [growth.granules * self._granule for growth in growths]
        # What failed may have left something behind, whether or not it is undone by others yet.
        stuck_bytes = self._set_aside(outcome)
        if outcome.done and not growing.undoing:
            self.circulate(self._pool.confirm_growth(growths))
            self._bar(outcome)
            self.made += 1
            self.came(growths)
            self.journal.note(Kind.GROW, growing.cause, of_shape)
            return
        mapped = {rank for rank, answer in outcome.answers.items() if answer.done}
        gone = self._asked(outcome) if growing.undoing else self._refusing(outcome)
        self._ranks.refund({m.rank: of_shape[m.shape] - stuck_bytes.get(m.rank, 0) for m in gone})
        if growing.undoing or not mapped:
            self._pool.abort_growth(growths)
        else:
            sequence = self._ranks.undo_growth(outcome.orders, mapped)
            self._growing[sequence] = _Growing(growths, growing.cause, undoing=True)
        if not growing.undoing:
            self.refused += 1
            self.journal.note(Kind.REFUSE, Cause.DEVICE, of_shape)
        self._bar(outcome)

    def _end_shrink(self, shrinking: _Shrinking, outcome: Outcome) -> None:
        stuck_bytes = self._set_aside(outcome)
        size = self._granule
        back = {
            m.rank: size * (shrinking.shrinks[m.shape].granules + shrinking.transient[m.shape])
            - stuck_bytes.get(m.rank, 0)
            for m in self._ranks.members
        }
        gone = []
        for shape, shrink in enumerate(shrinking.shrinks):
            split_up = []
            for split in shrink.splits:
                freed_bytes = size * (split.extent.granules - split.kept_granules)
                members = [m for m in self._ranks.members if m.shape == shape]
                whole = [
                    m for m in members if split.extent.first * size in outcome.answers[m.rank].kept
                ]
                for member in whole:
                    back[member.rank] -= freed_bytes
                self.unsplit += bool(whole)
                if not whole:
                    split_up.append(split)
                elif len(whole) == len(members):
                    self.circulate(self._pool.keep_whole(shape, split))
                else:
                    self._keep_apart(shape, split, whole, freed_bytes)
            gone.append(Shrink(shrink.extents, tuple(split_up)))
        self._pool.confirm_shrink(gone)
        self._bar(outcome)
        self._ranks.refund(back)

    def _keep_apart(
        self, shape: int, split: Split, whole: Sequence[Member], freed_bytes: int
    ) -> None:
        self._pool.keep_apart(shape, split)
        for member in whole:
            self.quarantined_bytes[member.rank] += freed_bytes

    # What devices did not take back --------------------------------------------------------------

    def _set_aside(self, outcome: Outcome) -> dict[int, int]:
        """What stays charged of what the order was granted, by rank."""
        for rank, answer in outcome.answers.items():
            self.quarantined_bytes[rank] += answer.stuck_before_bytes
        stuck_bytes = {rank: a.stuck_bytes for rank, a in outcome.answers.items() if a.stuck_bytes}
        for rank, size_bytes in stuck_bytes.items():
            self.quarantined_bytes[rank] += size_bytes
        return stuck_bytes

    def _bar(self, outcome: Outcome) -> None:
        """Where something is still mapped, nothing is mapped again."""
        for member in self._asked(outcome):
            blocked = outcome.answers[member.rank].blocked
            self._blocked[member.shape].update(runs(blocked, self._granule))
        for shape, blocked_runs in enumerate(self._blocked):
            self._pool.block(shape, sorted(blocked_runs))

    def _asked(self, outcome: Outcome) -> list[Member]:
        return [m for m in self._ranks.members if m.rank in outcome.answers]

    def _refusing(self, outcome: Outcome) -> list[Member]:
        return [m for m in self._asked(outcome) if not outcome.answers[m.rank].done]
