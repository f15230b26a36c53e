"""Which extents go first: free ones, then those whose newest cached block is oldest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.pool.extents import Extents
from kvtide.pool.geometry import Indices
from kvtide.pool.plans import Run, Shrink, Split, runs_of

__all__ = ["Selection", "Standing"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the engine says of its blocks now; arrays of shape (blocks_total,).

    Attributes
    ----------
    usable
        Blocks in circulation.
    free
        Usable blocks that hold nothing.
    cached_age
        For usable blocks that only a prefix cache holds, their place in its order of eviction,
        from 0, the oldest; -1 for all others.
    """

    usable: Mask
    free: Mask
    cached_age: npt.NDArray[np.int64]

    @property
    def live(self) -> Mask:
        """Blocks that a request holds (and the null block)."""
        return self.usable & ~self.free & (self.cached_age < 0)


class Selection:
    """What one rank could give back, chosen step by step; nothing changes until a plan is begun."""

    def __init__(self, extents: Extents, standing: Standing) -> None:
        self._extents = extents
        self._standing = standing
        self._gone = np.zeros(extents.geometry.granules_total, np.bool_)
        self.granules = 0
        self._whole: list[Run] = []
        self._splits: list[Split] = []
        self._runs = list(extents.mapped.items())
        table = np.array(self._runs, np.int64).reshape(-1, 2)
        self._first, self._count = table[:, 0], table[:, 1]
        # The blocks [low, high) over each extent, one span a strip.
        self._which, self._low, self._high = extents.geometry.blocks_over(
            self._first, self._first + self._count
        )

    def choose_whole(
        self, wanted_granules: int | None, *, cached: bool, at_most: bool = False
    ) -> None:
        """Choose whole extents that no live block touches, until there are enough.

        Free ones go first, the highest before lower ones; with `cached` then those of the prefix
        cache, by the age of their newest block, then by how many they hold. None wants all. The
        last one may be more than is wanted, but not with `at_most`.
        """
        idle, newest, held = self._survey()
        may_go = idle if cached else idle & (newest < 0)
        order = np.lexsort((-self._first, held, newest))
        order = order[may_go[order]]
        if wanted_granules is not None:
            sums = np.cumsum(self._count[order])
            if at_most:
                order = order[: int(np.searchsorted(sums, wanted_granules, side="right"))]
            else:
                order = order[: int(np.searchsorted(sums, wanted_granules)) + 1]
        for i in order.tolist():
            self._take(i)

    def choose_splits(
        self,
        wanted_granules: int | None,
        transient_granules: int,
        *,
        cached: bool,
        staged: bool = False,
    ) -> int:
        """Choose extents to split, those with the least to copy first, until there is enough.

        What a split holds twice for a moment has to fit into what was chosen before it and is gone
        by then, and `transient_granules` on top. Without `cached` the blocks of the prefix cache
        stay where they are, as the live ones do. With `staged`, a split that does not fit is
        carried by free granules of other extents.

        Returns
        -------
        int
            Granules by which `transient_granules` falls short of one more split; 0 where there is
            enough, or nothing left to split.
        """
        pinned = self._standing.live
        if not cached:
            pinned = pinned | (self._standing.cached_age >= 0)
        needed = self._granules_under(np.flatnonzero(pinned))
        sums = np.concatenate(([0], np.cumsum(needed)))
        kept = sums[self._first + self._count] - sums[self._first]
        may_split = (kept > 0) & (kept < self._count) & ~self._gone[self._first]
        order = np.argsort(kept / self._count, kind="stable")
        left: list[int] = order[may_split[order]].tolist()
        while left:
            passed = []
            for i in left:
                if wanted_granules is not None and self.granules >= wanted_granules:
                    return 0
                if kept[i] > self.granules + transient_granules:
                    passed.append(i)
                else:
                    self._split(i, needed, ())
            if len(passed) == len(left):
                # What is split frees more than it keeps, so only the first has to be carried.
                smallest = min(left, key=lambda i: int(kept[i]))
                staging = self._staging(smallest, int(kept[smallest])) if staged else ()
                if not staging:
                    return int(kept[smallest]) - self.granules - transient_granules
                self._split(smallest, needed, staging)
                passed.remove(smallest)
            left = passed
        return 0

    def withdrawn(self) -> Mask:
        """Usable blocks that touch what is chosen."""
        result: Mask = np.zeros(len(self._standing.usable), np.bool_)
        for low, high in self._extents.blocks_under(self.shrink().leaving()):
            result[low:high] = True
        return result & self._standing.usable

    def choose_stranded(self, left: Mask) -> None:
        """Choose as well the extents that serve none of the blocks that are left."""
        serves = self._over_each(left)
        for i in np.flatnonzero((serves == 0) & ~self._gone[self._first]).tolist():
            self._take(i)

    def shrink(self) -> Shrink:
        """The choice as a plan."""
        return Shrink(
            extents=tuple(self._whole),
            splits=tuple(self._splits),
        )

    # -------------------------------------------------------------------------------------------

    def _take(self, i: int) -> None:
        run = Run(*self._runs[i])
        self._gone[run.first : run.first + run.granules] = True
        self.granules += run.granules
        self._whole.append(run)

    def _split(self, i: int, needed: Mask, staging: tuple[int, ...]) -> None:
        first, count = self._runs[i]
        part = needed[first : first + count]
        self._gone[first : first + count] = ~part
        self.granules += count - int(np.count_nonzero(part))
        self._splits.append(Split(Run(first, count), tuple(runs_of(part, first)), staging))

    def _staging(self, i: int, wanted: int) -> tuple[int, ...]:
        """So many granules of other extents that hold nothing; none when there are not so many."""
        standing = self._standing
        spare = self._extents.mapped_granules() & ~self._gone
        spare &= ~self._granules_under(np.flatnonzero(standing.usable & ~standing.free))
        spare[self._first[i] : self._first[i] + self._count[i]] = False
        found: list[int] = np.flatnonzero(spare)[:wanted].tolist()
        return tuple(found) if len(found) == wanted else ()

    def _over_each(self, marked: Mask) -> Indices:
        """How many marked blocks touch each extent; one of several strips counts in each."""
        sums = np.concatenate(([0], np.cumsum(marked)))
        counts = np.zeros(len(self._runs), np.int64)
        np.add.at(counts, self._which, sums[self._high] - sums[self._low])
        return counts

    def _survey(self) -> tuple[Mask, Indices, Indices]:
        """Of each extent: no live block touches it; its newest cached block; how many it holds."""
        age = self._standing.cached_age
        cached = age >= 0
        newest = np.full(len(self._runs), -1, np.int64)
        if cached.any() and len(self._which):
            # Behind the last block there must be one value more for spans that end there.
            bounds = np.stack((self._low, self._high), axis=1).ravel()
            newest_over = np.maximum.reduceat(np.append(age, -1), bounds)[::2]
            np.maximum.at(newest, self._which, newest_over)
        return self._over_each(self._standing.live) == 0, newest, self._over_each(cached)

    def _granules_under(self, blocks: Indices) -> Mask:
        marks = np.zeros(self._extents.geometry.granules_total + 1, np.int64)
        for strip in self._extents.geometry.strips:
            first, last = self._extents.geometry.granules_of(blocks, strip)
            np.add.at(marks, first, 1)
            np.add.at(marks, last + 1, -1)
        under: Mask = np.cumsum(marks[:-1]) > 0
        return under
