"""The blocks of one engine over its arena: which of them are backed, and how that changes.

A pool decides and keeps count; it maps nothing itself. Every change is made as a plan, begun
(what leaves is out of circulation at once), and confirmed or aborted when the ranks have answered
(what comes is in circulation only then). Ranks of one geometry (tensor parallel) change as one;
where geometries differ (pipeline parallel) a block is usable when all back it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtide.pool.extents import Extents
from kvtide.pool.geometry import Geometry
from kvtide.pool.plans import Growth, Shrink
from kvtide.pool.reclaim import Selection, Standing

__all__ = ["Pool"]

Mask = npt.NDArray[np.bool_]


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
    Of each block: `usable`, it is in circulation; or `open`, mapping can make it usable; or
    neither, because it is coming (its granules are being mapped) or leaving.
    """

    def __init__(self, geometries: list[Geometry], extent_cap_bytes: int) -> None:
        self.blocks_total = geometries[0].blocks_total
        assert all(g.blocks_total == self.blocks_total for g in geometries)
        self.shapes = [Extents(g, extent_cap_bytes) for g in geometries]
        self._usable = np.zeros(self.blocks_total, np.bool_)
        self._open = np.ones(self.blocks_total, np.bool_)
        # No open block lies below this one.
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
        targets = self._targets(blocks)
        if not len(targets):
            return None
        return [shape.plan_growth(targets) for shape in self.shapes]

    def _targets(self, blocks: int) -> npt.NDArray[np.int64]:
        window = max(4 * blocks, 4096)
        while True:
            found = np.flatnonzero(self._open[self._low : self._low + window])[:blocks]
            if len(found) >= blocks or self._low + window >= self.blocks_total:
                if len(found):
                    self._low += int(found[0])
                    found = found - found[0]
                else:
                    self._low = self.blocks_total
                return (found + self._low).astype(np.int64)
            window *= 4

    def begin_growth(self, growths: list[Growth]) -> None:
        """Note that the ranks are mapping this: its blocks are no longer open."""
        for shape, growth in zip(self.shapes, growths, strict=True):
            shape.begin_growth(growth)
        self._close(growths)

    def confirm_growth(self, growths: list[Growth]) -> list[int]:
        """All ranks have mapped it; the blocks that became usable, ascending."""
        for shape, growth in zip(self.shapes, growths, strict=True):
            shape.confirm_growth(growth)
        touched = self._touched(growths)
        backed = self._all_back(touched, coming=False)
        fresh = touched[backed & ~self._usable[touched]]
        self._usable[fresh] = True
        self._open[fresh] = False
        self.usable_count += len(fresh)
        blocks: list[int] = fresh.tolist()
        return blocks

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
        split_transient_granules: int = 0,
    ) -> tuple[list[Shrink], Mask] | None:
        """Choose what each shape gives back, at least so much if there is so much.

        Parameters
        ----------
        standing
            Of the engine's blocks.
        wanted_granules
            Of each shape; None wants all that may go.
        cached
            Whether blocks of the prefix cache may go too.
        split_transient_granules
            How much may be held twice while extents are split, beyond what the whole extents that
            go make room for; splitting is tried only where whole extents are not enough, and not
            at all when this is negative.

        Returns
        -------
        (list of Shrink, mask of shape (blocks_total,)) or None
            The plans and the blocks that leave circulation; None when nothing can go.
        """
        choices = [Selection(shape, standing) for shape in self.shapes]
        for choice, wanted in zip(choices, wanted_granules, strict=True):
            choice.choose_whole(wanted, cached=cached)
            if split_transient_granules >= 0 and (wanted is None or choice.granules < wanted):
                room = choice.granules + split_transient_granules
                choice.choose_splits(wanted, room, cached=cached)
        withdrawn = choices[0].withdrawn()
        for choice in choices[1:]:
            withdrawn |= choice.withdrawn()
        left = standing.usable & ~withdrawn
        for choice in choices:
            choice.choose_stranded(left)
        shrinks = [choice.shrink() for choice in choices]
        return (shrinks, withdrawn) if any(s.granules for s in shrinks) else None

    def begin_shrink(self, shrinks: list[Shrink], withdrawn: Mask) -> None:
        """Take the withdrawn blocks, none of them live, out of circulation."""
        assert not np.any(withdrawn & ~self._usable)
        for shape, shrink in zip(self.shapes, shrinks, strict=True):
            shape.begin_shrink(shrink)
        self._usable &= ~withdrawn
        self.usable_count -= int(np.count_nonzero(withdrawn))
        # A block that is open and touches what leaves must wait until it is gone.
        for shape, shrink in zip(self.shapes, shrinks, strict=True):
            self._open[shape.touched_by_leaving(shrink)] = False

    def confirm_shrink(self, shrinks: list[Shrink]) -> None:
        """All ranks have given it back; its blocks may be mapped again."""
        for shape, shrink in zip(self.shapes, shrinks, strict=True):
            shape.confirm_shrink(shrink)
        for shape, shrink in zip(self.shapes, shrinks, strict=True):
            self._reopen(shape.touched_by_leaving(shrink))

    def usable_mask(self) -> Mask:
        """A copy of which blocks are in circulation."""
        usable: Mask = self._usable.copy()
        return usable

    # -------------------------------------------------------------------------------------------

    def _touched(self, growths: list[Growth]) -> npt.NDArray[np.int64]:
        parts = [
            shape.blocks_under(growth.extents)
            for shape, growth in zip(self.shapes, growths, strict=True)
        ]
        return parts[0] if len(parts) == 1 else np.unique(np.concatenate(parts))

    def _all_back(self, blocks: npt.NDArray[np.int64], *, coming: bool) -> Mask:
        backed: Mask = np.ones(len(blocks), np.bool_)
        for shape in self.shapes:
            backed &= shape.backs(blocks, coming=coming)
        return backed

    def _close(self, growths: list[Growth]) -> None:
        touched = self._touched(growths)
        self._open[touched[self._all_back(touched, coming=True)]] = False

    def _reopen(self, blocks: npt.NDArray[np.int64]) -> None:
        """Open those of these blocks that are neither usable, coming nor touched by what leaves."""
        idle = blocks[~self._usable[blocks] & ~self._all_back(blocks, coming=True)]
        for shape in self.shapes:
            idle = idle[~shape.leaving_under(idle)]
        self._open[idle] = True
        if len(idle):
            self._low = min(self._low, int(idle[0]))
