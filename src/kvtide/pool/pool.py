"""The blocks of one engine over its arena: which of them are backed, and how that changes.

A pool decides and keeps count; it maps nothing itself. Every change is made as a plan, begun
(what leaves is out of circulation at once), and confirmed or aborted when the ranks have answered
(what comes is in circulation only then). Ranks of one geometry (tensor parallel) change as one;
where geometries differ (pipeline parallel) a block is usable when all back it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.pool.extents import Extents
from kvtide.pool.geometry import Geometry
from kvtide.pool.plans import Growth, Run, Shrink, Span, Split, merged, without
from kvtide.pool.reclaim import Selection, Standing

__all__ = ["Pool", "Reclaim", "Splits"]

Mask = npt.NDArray[np.bool_]


class Splits(NamedTuple):
    """How extents may be split.

    Attributes
    ----------
    transient_granules
        Of each shape: how much may be held twice meanwhile, beyond what goes before.
    staged
        Whether a split for which even that is too little may be carried by free granules.
    """

    transient_granules: Sequence[int]
    staged: bool


class Reclaim(NamedTuple):
    """What could be given back.

    Attributes
    ----------
    shrinks
        Of each shape.
    withdrawn
        The blocks that leave circulation, shape (blocks_total,).
    lacking
        Of each shape: granules of transient that were missing for one more split.
    """

    shrinks: list[Shrink]
    withdrawn: Mask
    lacking: list[int]


class Pool:
    """Blocks in circulation over all geometries of an engine's ranks.

    Parameters
    ----------
    geometries
        The distinct ones of its ranks, all of the same number of blocks.
    extent_cap_bytes
        The largest extent.

    Notes
    -----
    A block is usable, in circulation; or open, mapping can make it usable; or neither, while its
    granules are being mapped or given back.
    """

    def __init__(self, geometries: list[Geometry], extent_cap_bytes: int) -> None:
        self.blocks_total = geometries[0].blocks_total
        assert all(g.blocks_total == self.blocks_total for g in geometries)
        self.shapes = [Extents(g, extent_cap_bytes) for g in geometries]
        # The same bytes twice, as of granules.
        self._usable_bytes = bytearray(self.blocks_total)
        self._usable: Mask = np.frombuffer(self._usable_bytes, np.bool_)
        # No block below this one is open, or is going to be unless it says so here.
        self._low = 0
        self.usable_count = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all extents that are mapped, coming or leaving, one rank of each shape."""
        return sum(shape.mapped_bytes for shape in self.shapes)

    def is_usable(self, block: int) -> bool:
        """Whether a block is in circulation."""
        return bool(self._usable[block])

    # Growth ------------------------------------------------------------------------------------

    def plan_growth(self, blocks: int) -> list[Growth] | None:
        """What each rank must map so that the lowest `blocks` open blocks become usable.

        Fewer when fewer are open; None when none is.
        """
        targets = self._lowest_open(blocks)
        if not targets:
            return None
        return [shape.plan_growth(targets) for shape in self.shapes]

    def _lowest_open(self, wanted: int) -> list[Span]:
        targets: list[Span] = []
        low, window = self._low, max(2 * wanted, 256)
        while wanted and low < self.blocks_total:
            high = min(low + window, self.blocks_total)
            for start, end in self._open(low, high):
                taken = min(wanted, end - start)
                targets.append((start, start + taken))
                wanted -= taken
                if not wanted:
                    break
            low, window = high, 4 * window
        if targets:
            self._low = targets[0][0]
        return targets

    def _open(self, low: int, high: int) -> list[Span]:
        """Of blocks [low, high), those that mapping can make usable."""
        shapes = self.shapes
        lacking = merged([span for shape in shapes for span in shape.lacking_under(low, high)])
        barred = merged([span for shape in shapes for span in shape.barred_under(low, high)])
        return without(lacking, barred)

    def begin_growth(self, growths: list[Growth]) -> None:
        """Note that the ranks are mapping this: its blocks are no longer open."""
        for shape, growth in zip(self.shapes, growths, strict=True):
            shape.begin_growth(growth)

    def confirm_growth(self, growths: list[Growth]) -> list[Span]:
        """All ranks have mapped it; the spans of blocks that became usable."""
        for shape, growth in zip(self.shapes, growths, strict=True):
            shape.confirm_growth(growth)
        return self._put_in_circulation(self._touched(growths))

    def abort_growth(self, growths: list[Growth]) -> None:
        """No rank holds any of it (any more)."""
        for shape, growth in zip(self.shapes, growths, strict=True):
            shape.abort_growth(growth)
        self._reopen(self._touched(growths))

    # Shrinking ---------------------------------------------------------------------------------

    def plan_shrink(
        self,
        standing: Standing,
        wanted_granules: Sequence[int | None],
        *,
        cached: bool,
        splits: Splits | None = None,
        at_most: bool = False,
    ) -> Reclaim:
        """Choose what each shape gives back, at least so much if there is so much.

        Parameters
        ----------
        standing
            Of the engine's blocks.
        wanted_granules
            Of each shape; None wants all that may go.
        cached
            Whether blocks of the prefix cache may go too.
        splits
            Whether, where whole extents are not enough, others are split.
        at_most
            Rather give less than more than is wanted.
        """
        choices = [Selection(shape, standing) for shape in self.shapes]
        lacking = [0] * len(choices)
        for i, (choice, wanted) in enumerate(zip(choices, wanted_granules, strict=True)):
            choice.choose_whole(wanted, cached=cached, at_most=at_most)
            if splits is not None:
                lacking[i] = choice.choose_splits(
                    wanted, splits.transient_granules[i], cached=cached, staged=splits.staged
                )
        withdrawn = choices[0].withdrawn()
        for choice in choices[1:]:
            withdrawn |= choice.withdrawn()
        left = standing.usable & ~withdrawn
        for choice in choices:
            choice.choose_stranded(left)
        return Reclaim([choice.shrink() for choice in choices], withdrawn, lacking)

    def begin_shrink(self, shrinks: list[Shrink], withdrawn: Mask) -> None:
        """Take the withdrawn blocks, none of them live, out of circulation."""
        for shape, shrink in zip(self.shapes, shrinks, strict=True):
            shape.begin_shrink(shrink)
        assert not np.any(withdrawn & ~self._usable)
        self._usable &= ~withdrawn
        self.usable_count -= int(np.count_nonzero(withdrawn))

    def confirm_shrink(self, shrinks: list[Shrink]) -> None:
        """All ranks have given it back; its blocks may be mapped again."""
        for shape, shrink in zip(self.shapes, shrinks, strict=True):
            shape.confirm_shrink(shrink)
            self._reopen(shape.blocks_under(shrink.leaving()))

    def keep_whole(self, shape: int, split: Split) -> list[Span]:
        """No rank of a shape has split an extent; the spans of blocks that are usable again."""
        self.shapes[shape].keep_whole(split)
        touched = merged(self.shapes[shape].blocks_under(split.leaving()))
        fresh = self._put_in_circulation(touched)
        self._reopen(touched)
        return fresh

    def keep_apart(self, shape: int, split: Split) -> None:
        """Not all ranks of a shape have split an extent: it stays as it is for good."""
        self.shapes[shape].keep_apart(split)

    def block(self, shape: int, runs: Sequence[Run]) -> None:
        """Some rank of a shape could not unmap this: nothing can be mapped there any more."""
        self.shapes[shape].block(runs)

    def usable_mask(self) -> Mask:
        """A copy of which blocks are in circulation."""
        usable: Mask = self._usable.copy()
        return usable

    def _put_in_circulation(self, touched: list[Span]) -> list[Span]:
        """The spans of these blocks, none of them usable yet, that all shapes back now."""
        unbacked = [
            span
            for low, high in touched
            for shape in self.shapes
            for span in shape.unbacked_under(low, high)
        ]
        fresh = without(touched, merged(unbacked))
        for start, end in fresh:
            assert not self._usable_bytes.count(1, start, end)
            self._usable_bytes[start:end] = b"\1" * (end - start)
            self.usable_count += end - start
        return fresh

    def _touched(self, growths: list[Growth]) -> list[Span]:
        pairs = zip(self.shapes, growths, strict=True)
        return merged([span for shape, g in pairs for span in shape.blocks_under(g.extents)])

    def _reopen(self, spans: Iterable[Span]) -> None:
        self._low = min([self._low, *(low for low, _ in spans)])
