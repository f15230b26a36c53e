"""Where the bytes of a block lie in an arena, and which granules a run of blocks touches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Geometry", "Strip"]

Indices = npt.NDArray[np.int64]


class Strip(NamedTuple):
    """One part of every block: block `b` has bytes [offset + b * stride, + length) of the arena.

    A layer-outermost cache has one strip a layer (layers of different groups that share their
    bytes count once); a block-outermost one has a single strip.
    """

    offset_bytes: int
    stride_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Geometry:
    """The blocks of one rank over one arena.

    Attributes
    ----------
    blocks_total
        Blocks that there may ever be, the null block 0 among them.
    strips
        Distinct strips, by offset.
    arena_bytes
        Addresses reserved, a multiple of the granularity that covers all strips.
    granularity_bytes
        Bytes of a granule, the smallest extent.
    """

    blocks_total: int
    strips: tuple[Strip, ...]
    arena_bytes: int
    granularity_bytes: int

    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = tuple(strip.offset_bytes for strip in self.strips)
        ends = tuple(
            s.offset_bytes + (self.blocks_total - 1) * s.stride_bytes + s.length_bytes
            for s in self.strips
        )
        object.__setattr__(self, "_starts", starts)
        # Never falling, so that it can be searched: strips may overlap, or lie within each other.
        object.__setattr__(self, "_ends", tuple(accumulate(ends, max)))
        assert self.blocks_total > 0
        assert self.strips
        assert self.arena_bytes % self.granularity_bytes == 0
        for strip in self.strips:
            assert 0 < strip.length_bytes <= strip.stride_bytes
            last = strip.offset_bytes + (self.blocks_total - 1) * strip.stride_bytes
            assert last + strip.length_bytes <= self.arena_bytes

    @classmethod
    def of(cls, blocks_total: int, strips: Sequence[Strip], granularity_bytes: int) -> Geometry:
        """These strips, duplicates removed, over the smallest arena that holds them."""
        distinct = tuple(sorted(set(strips)))
        end = max(
            s.offset_bytes + (blocks_total - 1) * s.stride_bytes + s.length_bytes for s in distinct
        )
        granules = -(-end // granularity_bytes)
        return cls(blocks_total, distinct, granules * granularity_bytes, granularity_bytes)

    @property
    def granules_total(self) -> int:
        """Granules of the arena."""
        return self.arena_bytes // self.granularity_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all strips together."""
        return sum(strip.length_bytes for strip in self.strips)

    def granule_runs(self, first_block: int, end_block: int) -> list[tuple[int, int]]:
        """The granules [first, end) that blocks [first_block, end_block) touch, one run a strip."""
        assert 0 <= first_block < end_block <= self.blocks_total
        size = self.granularity_bytes
        last_block = end_block - 1
        return [
            (
                (offset + first_block * stride) // size,
                (offset + last_block * stride + length - 1) // size + 1,
            )
            for offset, stride, length in self.strips
        ]

    def block_spans(self, first_granule: int, granules: int) -> list[tuple[int, int]]:
        """The blocks [low, high) that touch a run of granules, one span a strip it meets."""
        start = first_granule * self.granularity_bytes
        end = start + granules * self.granularity_bytes
        spans = []
        last_strip = bisect_left(self._starts, end)
        first_strip = bisect_right(self._ends, start, 0, last_strip)
        for offset, stride, length in self.strips[first_strip:last_strip]:
            low = (start - offset - length) // stride + 1
            high = -((offset - end) // stride)
            low = low if low > 0 else 0
            high = high if high < self.blocks_total else self.blocks_total
            if low < high:
                spans.append((low, high))
        return spans

    def granules_of(self, blocks: Indices, strip: Strip) -> tuple[Indices, Indices]:
        """First and last granule that each of these blocks touches in one strip."""
        start = strip.offset_bytes + blocks * strip.stride_bytes
        return start // self.granularity_bytes, (
            start + strip.length_bytes - 1
        ) // self.granularity_bytes

    def blocks_over(self, first: Indices, end: Indices) -> tuple[Indices, Indices, Indices]:
        """For runs of granules [first, end): the blocks that touch them, one span a strip.

        Returns
        -------
        which, low, high
            Of each span: the run, by its place among them, and its blocks [low, high).
        """
        start, stop = first * self.granularity_bytes, end * self.granularity_bytes
        last_strip = np.searchsorted(self._starts, stop)
        first_strip = np.minimum(np.searchsorted(self._ends, start, "right"), last_strip)
        strips = last_strip - first_strip
        which = np.repeat(np.arange(len(first)), strips)
        strip = np.arange(len(which)) - (np.cumsum(strips) - last_strip)[which]
        offset, stride, length = np.array(self.strips)[strip].T
        low = np.maximum((start[which] - offset - length) // stride + 1, 0)
        high = np.minimum(-((offset - stop[which]) // stride), self.blocks_total)
        some = low < high
        return which[some], low[some], high[some]
