"""What a pool decides to map or to give back, as values: made first, begun and confirmed later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "Growth",
    "Run",
    "Shrink",
    "Span",
    "Split",
    "merged",
    "runs_of",
    "spans_of",
    "without",
]


Span = tuple[int, int]
"""Blocks [low, high)."""


class Run(NamedTuple):
    """Granules [first, first + granules) of an arena."""

    first: int
    granules: int


class Split(NamedTuple):
    """An extent of which only some runs stay mapped, at their addresses.

    What is kept is held twice for a moment. Where no memory can be had for that, `staging` names
    free granules of other extents, one for each that is kept: these carry the contents over while
    the extent goes first.
    """

    extent: Run
    keep: tuple[Run, ...]
    staging: tuple[int, ...] = ()

    @property
    def kept_granules(self) -> int:
        """Granules that stay."""
        return sum(run.granules for run in self.keep)

    def leaving(self) -> list[Run]:
        """The runs of granules that go."""
        runs, position = [], self.extent.first
        for kept in (*self.keep, Run(self.extent.first + self.extent.granules, 0)):
            if kept.first > position:
                runs.append(Run(position, kept.first - position))
            position = kept.first + kept.granules
        return runs


@dataclass(frozen=True, slots=True)
class Growth:
    """Extents to map.

    Attributes
    ----------
    granules
        The sum of their counts.
    blocks
        Those that it is for: so many become usable by it at least.
    """

    extents: tuple[Run, ...]
    granules: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """What to give back.

    Attributes
    ----------
    extents
        Whole extents that go.
    splits
        Extents of which only the granules under live blocks stay.
    """

    extents: tuple[Run, ...]
    splits: tuple[Split, ...] = ()

    @property
    def granules(self) -> int:
        """Granules given back in the end."""
        whole = sum(run.granules for run in self.extents)
        return whole + sum(s.extent.granules - s.kept_granules for s in self.splits)

    def leaving(self) -> list[Run]:
        """The runs of granules that go."""
        return [*self.extents, *(run for split in self.splits for run in split.leaving())]


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Half-open spans in order, those that touch or overlap joined."""
    joined: list[tuple[int, int]] = []
    start = end = 0
    for low, high in sorted(spans):
        if joined and low <= end:
            end = max(end, high)
            joined[-1] = (start, end)
        else:
            start, end = low, high
            joined.append((low, high))
    return joined


def without(spans: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]) -> list[Span]:
    """Half-open spans less holes; both in order, and none that overlap."""
    left, at = [], 0
    for low, high in spans:
        while at < len(holes) and holes[at][0] < high:
            start, end = holes[at]
            if start > low:
                left.append((low, start))
            low = max(low, end)
            if end > high:  # it may reach into the next one
                break
            at += 1
        if low < high:
            left.append((low, high))
    return left


def spans_of(mask: npt.NDArray[np.bool_], base: int) -> list[Span]:
    """The spans of True in a mask, counted from `base`."""
    if mask.all():
        return [(base, base + len(mask))] if len(mask) else []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])))) + base
    bounds = edges.tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def runs_of(mask: npt.NDArray[np.bool_], base: int = 0) -> list[Run]:
    """The runs of True in a mask, as granules counted from `base`."""
    return [Run(low, high - low) for low, high in spans_of(mask, base)]
