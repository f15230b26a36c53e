"""Free blocks, lowest first: live blocks stay low in the arena, so that its high extents empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "FreeBlocks"]


class Block(Protocol):
    """Anything that an engine hands out by number."""

    block_id: int


B = TypeVar("B", bound=Block)


class FreeBlocks(Generic[B]):
    """Free blocks in drawers of consecutive numbers; whole slices are taken from the lowest.

    `take` costs a slice a drawer and `give` one append a block, whatever the pool's size. Within
    a drawer the block freed last is taken first.
    """

    def __init__(self, blocks_total: int, drawer_blocks: int = 64) -> None:
        drawers: list[list[B]] = [[] for _ in range(-(-blocks_total // drawer_blocks))]
        self._drawers = drawers
        # The drawer of each block, by its number: one index instead of a division in `give`.
        self._drawer_of = [drawers[b // drawer_blocks] for b in range(blocks_total)]
        self._drawer_blocks = drawer_blocks
        # Numbers of drawers that hold something, and perhaps of some that no longer do.
        self._stocked: list[int] = []
        self.count = 0

    def take(self, wanted: int) -> list[B]:
        """Take up to `wanted` blocks, from the lowest drawers."""
        stocked, drawers = self._stocked, self._drawers
        taken: list[B] = []
        missing = min(wanted, self.count)
        self.count -= missing
        while missing:
            drawer = drawers[stocked[0]]
            if len(drawer) > missing:
                taken += drawer[-missing:]
                del drawer[-missing:]
                break
            taken += drawer
            missing -= len(drawer)
            drawer.clear()
            heappop(stocked)
        return taken

    def give(self, blocks: Iterable[B]) -> None:
        """Put blocks back; none of them may be here already."""
        drawer_of, given = self._drawer_of, 0
        for block in blocks:
            drawer = drawer_of[block.block_id]
            if not drawer:
                heappush(self._stocked, block.block_id // self._drawer_blocks)
            drawer.append(block)
            given += 1
        self.count += given

    def give_span(self, blocks: Sequence[B], low: int, high: int) -> None:
        """Put back blocks [low, high) of all `blocks`; the lowest is taken first."""
        size, start = self._drawer_blocks, low
        while start < high:
            number = start // size
            end = min(high, (number + 1) * size)
            drawer = self._drawers[number]
            if not drawer:
                heappush(self._stocked, number)
            drawer += blocks[start:end][::-1]
            start = end
        self.count += high - low

    def withdraw(self, gone: npt.NDArray[np.bool_]) -> None:
        """Drop every free block whose number is marked in `gone`, shape (blocks_total,)."""
        size, marks = self._drawer_blocks, gone.tobytes()
        at = marks.find(1)
        while at >= 0:
            number = at // size
            drawer, end = self._drawers[number], (number + 1) * size
            held = len(drawer)
            if marks.count(1, end - size, end) == size:
                drawer.clear()
            else:
                drawer[:] = [block for block in drawer if not marks[block.block_id]]
            self.count -= held - len(drawer)
            at = marks.find(1, end)
        self._stocked = [n for n in set(self._stocked) if self._drawers[n]]
        heapify(self._stocked)

    def mask(self, blocks_total: int) -> npt.NDArray[np.bool_]:
        """Which blocks are free, by number."""
        free = np.zeros(blocks_total, np.bool_)
        size = self._drawer_blocks
        for number in self._stocked:
            drawer = self._drawers[number]
            if len(drawer) == size:
                free[number * size : (number + 1) * size] = True
            else:
                free[[block.block_id for block in drawer]] = True
        return free
