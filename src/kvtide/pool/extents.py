"""The extents of one rank: the state of every granule, and what lies over which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.pool.geometry import Geometry
from kvtide.pool.plans import Growth, Run, Shrink, Span, Split, merged

__all__ = ["Extents"]

Mask = npt.NDArray[np.bool_]

NONE, COMING, MAPPED, LEAVING, BLOCKED = range(5)
_FILL = [bytes([state]) for state in range(5)]


def _marking(*states: int) -> bytes:
    """A table for `translate`: 1 for each of these states, 0 for the others."""
    return bytes(state in states for state in range(256))


_NOTHING = _marking(NONE)
_BARRED = _marking(LEAVING, BLOCKED)
_NOT_MAPPED = _marking(NONE, COMING, LEAVING, BLOCKED)


def _marked(marks: bytearray, base: int) -> list[tuple[int, int]]:
    """The runs [first, end) of granules that are marked, counted from `base`."""
    if 0 not in marks:
        return [(base, base + len(marks))]
    runs, stop = [], 0
    while (start := marks.find(1, stop)) >= 0:
        stop = marks.find(0, start)
        if stop < 0:
            stop = len(marks)
        runs.append((base + start, base + stop))
    return runs


class Extents:
    """State of the granules of one arena, and the extents that cover them.

    Growth and shrinkage are noted here as they are planned, begun, and confirmed; who maps is
    above.
    """

    def __init__(self, geometry: Geometry, extent_cap_bytes: int) -> None:
        self.geometry = geometry
        self.granularity_bytes = geometry.granularity_bytes
        self._cap = max(1, extent_cap_bytes // geometry.granularity_bytes)
        # The same bytes twice: runs are found, compared and filled far faster as a bytearray.
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
    # Blocks are spans in no order, which may overlap; the same one but once.

    def blocks_under(self, runs: Iterable[Run]) -> set[Span]:
        """The blocks that touch these runs."""
        block_spans = self.geometry.block_spans
        return {span for first, count in runs for span in block_spans(first, count)}

    def lacking_under(self, low: int, high: int) -> set[Span]:
        """Of blocks [low, high): those that touch a granule that nothing backs or will."""
        return self._touching(_NOTHING, low, high)

    def barred_under(self, low: int, high: int) -> set[Span]:
        """Of blocks [low, high): those that touch a granule that leaves or is blocked."""
        if LEAVING not in self._bytes and BLOCKED not in self._bytes:
            return set()
        return self._touching(_BARRED, low, high)

    def unbacked_under(self, low: int, high: int) -> set[Span]:
        """Of blocks [low, high): those that touch a granule that is not mapped."""
        return self._touching(_NOT_MAPPED, low, high)

    def mapped_granules(self) -> Mask:
        """Which granules are mapped and not leaving."""
        mapped: Mask = self._state == MAPPED
        return mapped

    def _touching(self, marking: bytes, low: int, high: int) -> set[Span]:
        """Of blocks [low, high): those that touch a marked granule."""
        size, states = self.granularity_bytes, self._bytes
        spans: set[Span] = set()
        under = self.geometry.granule_runs(low, high)
        for (offset, stride, length), (first, end) in zip(self.geometry.strips, under, strict=True):
            marks = states[first:end].translate(marking)
            if 1 not in marks:
                continue
            if 0 not in marks:
                spans.add((low, high))
                continue
            for start, stop in _marked(marks, first):
                begin = max(low, (start * size - offset - length) // stride + 1)
                behind = min(high, -((offset - stop * size) // stride))
                if begin < behind:
                    spans.add((begin, behind))
        return spans

    # Growth ------------------------------------------------------------------------------------

    def plan_growth(self, targets: Sequence[Span]) -> Growth:
        """The extents that would back these blocks: their granules that nothing backs yet."""
        granule_runs = self.geometry.granule_runs
        extents: list[Run] = []
        for first, end in merged([run for span in targets for run in granule_runs(*span)]):
            for start, stop in _marked(self._bytes[first:end].translate(_NOTHING), first):
                # As few powers of two as make it up, none above the cap, largest first.
                while start < stop:
                    size = min(self._cap, 1 << ((stop - start).bit_length() - 1))
                    extents.append(Run(start, size))
                    start += size
        blocks = sum([high - low for low, high in targets])
        return Growth(tuple(extents), sum([granules for _, granules in extents]), blocks)

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
        states, before, after = self._bytes, _FILL[old], _FILL[new]
        for first, count in runs:
            end = first + count
            assert count > 0
            assert states[first:end] == before * count, f"granules {first}..{end} are not {old}"
            states[first:end] = after * count
