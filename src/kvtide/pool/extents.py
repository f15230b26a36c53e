"""The extents of one rank: the state of every granule, and what lies over which blocks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtide.pool.geometry import Geometry, Indices
from kvtide.pool.plans import Growth, Run, Shrink, cut, runs_of

__all__ = ["Extents"]

Mask = npt.NDArray[np.bool_]

NONE, COMING, MAPPED, LEAVING = range(4)


class Extents:
    """State of the granules of one arena, and the extents that cover them.

    Growth and shrinkage are noted here as they are planned, begun, and confirmed; who maps is
    above.
    """

    def __init__(self, geometry: Geometry, extent_cap_bytes: int) -> None:
        self.geometry = geometry
        self.granularity_bytes = geometry.granularity_bytes
        self._cap = max(1, extent_cap_bytes // geometry.granularity_bytes)
        self._state = np.zeros(geometry.granules_total, np.int8)
        # First granule -> granules, of extents that are mapped (not coming, not leaving).
        self.mapped: dict[int, int] = {}
        self._held_granules = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, coming or leaving."""
        return self._held_granules * self.granularity_bytes

    # Which blocks, which granules --------------------------------------------------------------

    def blocks_under(self, runs: Iterable[Run]) -> Indices:
        """The blocks that touch these runs, ascending."""
        merged: set[tuple[int, int]] = set()
        table = np.array([(r.first, r.first + r.granules) for r in runs], np.int64).reshape(-1, 2)
        for strip in self.geometry.strips:
            low, high = self.geometry.blocks_touching(table[:, 0], table[:, 1], strip)
            merged.update(zip(low.tolist(), high.tolist(), strict=True))
        spans = [np.arange(low, high) for low, high in merged if low < high]
        if not spans:
            return np.zeros(0, np.int64)
        return spans[0] if len(spans) == 1 else np.unique(np.concatenate(spans))

    def backs(self, blocks: Indices, *, coming: bool) -> Mask:
        """Whether all granules of each block are mapped; with `coming`, or being mapped."""
        good = self._state == MAPPED
        if coming:
            good |= self._state == COMING
        return self._count_in(good, blocks, whole=True)

    def leaving_under(self, blocks: Indices) -> Mask:
        """Whether each block touches a granule that is being given back."""
        return self._count_in(self._state == LEAVING, blocks, whole=False)

    def _count_in(self, marked: Mask, blocks: Indices, *, whole: bool) -> Mask:
        """Whether each block touches only marked granules (`whole`), or any."""
        sums = np.concatenate(([0], np.cumsum(marked)))
        result = np.full(len(blocks), whole)
        for strip in self.geometry.strips:
            first, last = self.geometry.granules_of(blocks, strip)
            inside = sums[last + 1] - sums[first]
            if whole:
                result &= inside == last + 1 - first
            else:
                result |= inside > 0
        return result

    # Growth ------------------------------------------------------------------------------------

    def plan_growth(self, targets: Indices) -> Growth:
        """The extents that would back these blocks: their granules that nothing backs yet."""
        wanted = np.zeros(len(self._state), np.bool_)
        edges = np.flatnonzero(np.diff(targets) != 1)
        starts = targets[np.concatenate(([0], edges + 1))]
        ends = targets[np.concatenate((edges, [len(targets) - 1]))] + 1
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            for first, last in self.geometry.granule_runs(start, end):
                wanted[first:last] = True
        wanted &= self._state == NONE
        extents = tuple(piece for run in runs_of(wanted) for piece in cut(run, self._cap))
        return Growth(extents, sum(run.granules for run in extents))

    def begin_growth(self, growth: Growth) -> None:
        """These extents are being mapped."""
        self._move(growth.extents, NONE, COMING)
        self._held_granules += growth.granules

    def confirm_growth(self, growth: Growth) -> None:
        """These extents are mapped."""
        self._move(growth.extents, COMING, MAPPED)
        self.mapped.update(growth.extents)

    def abort_growth(self, growth: Growth) -> None:
        """These extents were not mapped."""
        self._move(growth.extents, COMING, NONE)
        self._held_granules -= growth.granules

    # Shrinking ---------------------------------------------------------------------------------

    def leaving_runs(self, shrink: Shrink) -> list[Run]:
        """The runs of granules that a shrink takes away."""
        runs = list(shrink.extents)
        for extent, keep in shrink.splits:
            position = extent.first
            for kept in keep:
                if kept.first > position:
                    runs.append(Run(position, kept.first - position))
                position = kept.first + kept.granules
            if position < extent.first + extent.granules:
                runs.append(Run(position, extent.first + extent.granules - position))
        return runs

    def touched_by_leaving(self, shrink: Shrink) -> Indices:
        """The blocks that touch what a shrink takes away."""
        return self.blocks_under(self.leaving_runs(shrink))

    def begin_shrink(self, shrink: Shrink) -> None:
        """These extents are being given back; of the split ones the kept runs stay mapped."""
        self._move(self.leaving_runs(shrink), MAPPED, LEAVING)
        for run in (*shrink.extents, *(split.extent for split in shrink.splits)):
            count = self.mapped.pop(run.first)
            assert count == run.granules
        for split in shrink.splits:
            self.mapped.update(split.keep)

    def confirm_shrink(self, shrink: Shrink) -> None:
        """They are gone."""
        runs = self.leaving_runs(shrink)
        self._move(runs, LEAVING, NONE)
        self._held_granules -= sum(run.granules for run in runs)
        assert self._held_granules >= 0

    def _move(self, runs: Iterable[Run], old: int, new: int) -> None:
        for first, count in runs:
            part = self._state[first : first + count]
            assert count > 0
            assert np.all(part == old), f"granules {first}..{first + count} are not all {old}"
            part[:] = new
