"""The extents of one rank: the state of every granule, and what lies over which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.pool.geometry import Geometry, Indices, Strip
from kvtide.pool.plans import Growth, Run, Shrink, Span, Split, cut, merged, runs_of

__all__ = ["Extents"]

Mask = npt.NDArray[np.bool_]

NONE, COMING, MAPPED, LEAVING, BLOCKED = range(5)
_FILL = [bytes([state]) for state in range(5)]


class Extents:
    """State of the granules of one arena, and the extents that cover them.

    Growth and shrinkage are noted here as they are planned, begun, and confirmed; who maps is
    above.
    """

    def __init__(self, geometry: Geometry, extent_cap_bytes: int) -> None:
        self.geometry = geometry
        self.granularity_bytes = geometry.granularity_bytes
        self._cap = max(1, extent_cap_bytes // geometry.granularity_bytes)
        # The same bytes twice: slices of a run are counted and filled far faster as a bytearray.
        self._bytes = bytearray(geometry.granules_total)
        self._state: npt.NDArray[np.int8] = np.frombuffer(self._bytes, np.int8)
        # First granule -> granules, of extents that are mapped (not coming, not leaving).
        self.mapped: dict[int, int] = {}
        self._held_granules = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, coming or leaving."""
        return self._held_granules * self.granularity_bytes

    # Which blocks, which granules --------------------------------------------------------------

    def blocks_under(self, runs: Iterable[Run]) -> list[Span]:
        """The blocks that touch these runs, as spans in order."""
        return merged(
            span for run in runs for span in self.geometry.block_spans(run.first, run.granules)
        )

    def backs(self, low: int, high: int, *, coming: bool) -> Mask:
        """Of blocks [low, high): whether all their granules are mapped; or, `coming`, will be."""
        result: Mask = np.ones(high - low, np.bool_)
        count = self._bytes.count
        for strip, (first, end) in self._runs_under(low, high):
            good = count(MAPPED, first, end)
            if coming:
                good += count(COMING, first, end)
            if good == end - first:
                continue
            if not good:
                return np.zeros(high - low, np.bool_)
            state = self._state[first:end]
            marked = (state == MAPPED) | (state == COMING) if coming else state == MAPPED
            begins, ends, sums = self._tally(strip, first, marked, low, high)
            result &= sums[ends] - sums[begins] == ends - begins
        return result

    def barred_under(self, low: int, high: int) -> Mask:
        """Of blocks [low, high): whether each touches a granule that leaves or is blocked."""
        result: Mask = np.zeros(high - low, np.bool_)
        count = self._bytes.count
        for strip, (first, end) in self._runs_under(low, high):
            if count(LEAVING, first, end) or count(BLOCKED, first, end):
                barred = self._state[first:end] >= LEAVING
                begins, ends, sums = self._tally(strip, first, barred, low, high)
                result |= sums[ends] > sums[begins]
        return result

    def mapped_granules(self) -> Mask:
        """Which granules are mapped and not leaving."""
        mapped: Mask = self._state == MAPPED
        return mapped

    def _runs_under(self, low: int, high: int) -> Iterator[tuple[Strip, tuple[int, int]]]:
        """Of each strip: the granules [first, end) under the blocks."""
        return zip(self.geometry.strips, self.geometry.granule_runs(low, high), strict=True)

    def _tally(
        self, strip: Strip, base: int, marked: Mask, low: int, high: int
    ) -> tuple[Indices, Indices, Indices]:
        """Of each block: its granules [first, end) from `base`; and sums of the marked ones."""
        first, last = self.geometry.granules_of(np.arange(low, high), strip)
        sums: Indices = np.concatenate(([0], np.cumsum(marked)))
        return first - base, last + 1 - base, sums

    # Growth ------------------------------------------------------------------------------------

    def plan_growth(self, targets: Sequence[Span]) -> Growth:
        """The extents that would back these blocks: their granules that nothing backs yet."""
        touched = merged(
            run for low, high in targets for run in self.geometry.granule_runs(low, high)
        )
        extents: list[Run] = []
        for first, last in touched:
            if self._bytes.count(NONE, first, last) == last - first:
                runs = [Run(first, last - first)]
            else:
                runs = runs_of(self._state[first:last] == NONE, first)
            for run in runs:
                extents += cut(run, self._cap)
        return Growth(tuple(extents), sum(run.granules for run in extents))

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

    def begin_shrink(self, shrink: Shrink) -> None:
        """These extents are being given back; of the split ones the kept runs stay mapped."""
        self._move(shrink.leaving(), MAPPED, LEAVING)
        for run in (*shrink.extents, *(split.extent for split in shrink.splits)):
            count = self.mapped.pop(run.first)
            assert count == run.granules

    def confirm_shrink(self, shrink: Shrink) -> None:
        """They are gone, and what is left of the split ones are extents of their own."""
        self._move(shrink.leaving(), LEAVING, NONE)
        for split in shrink.splits:
            self.mapped.update(split.keep)
        self._held_granules -= shrink.granules
        assert self._held_granules >= 0

    def keep_whole(self, split: Split) -> None:
        """An extent was not split after all."""
        self._move(split.leaving(), LEAVING, MAPPED)
        self.mapped[split.extent.first] = split.extent.granules

    def keep_apart(self, split: Split) -> None:
        """Some ranks have split an extent and others could not: what is kept stays for good.

        Nothing is mapped again where the others have it whole, and it is never given back.
        """
        self._move(split.leaving(), LEAVING, BLOCKED)
        self._held_granules -= split.extent.granules - split.kept_granules

    def block(self, runs: Iterable[Run]) -> None:
        """Nothing can be mapped here any more: the device did not take back what was."""
        for first, count in runs:
            part = self._state[first : first + count]
            part[part == NONE] = BLOCKED

    def _move(self, runs: Iterable[Run], old: int, new: int) -> None:
        states = self._bytes
        for first, count in runs:
            end = first + count
            assert count > 0
            assert states.count(old, first, end) == count, f"granules {first}..{end} are not {old}"
            states[first:end] = _FILL[new] * count
