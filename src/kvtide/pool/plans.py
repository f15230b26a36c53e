"""What a pool decides to map or to give back, as values: made first, begun and confirmed later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Growth", "Run", "Shrink", "Split", "cut", "runs_of"]


class Run(NamedTuple):
    """Granules [first, first + granules) of an arena."""

    first: int
    granules: int


class Split(NamedTuple):
    """An extent of which only some runs stay mapped, at their addresses."""

    extent: Run
    keep: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """Extents to map. `granules` is the sum of their counts."""

    extents: tuple[Run, ...]
    granules: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """What to give back.

    Attributes
    ----------
    extents
        Whole extents that go.
    splits
        Extents of which only the granules under live blocks stay.
    granules
        Granules given back in the end.
    transient_granules
        Granules held twice while the splits are made.
    """

    extents: tuple[Run, ...]
    splits: tuple[Split, ...]
    granules: int
    transient_granules: int


def cut(run: Run, cap: int) -> list[Run]:
    """Cut a run into as few powers of two as make it up, none above `cap`, largest first."""
    pieces, first, left = [], run.first, run.granules
    while left:
        size = min(cap, 1 << (left.bit_length() - 1))
        pieces.append(Run(first, size))
        first += size
        left -= size
    return pieces


def runs_of(mask: npt.NDArray[np.bool_], base: int = 0) -> list[Run]:
    """The runs of True in a mask, as granules counted from `base`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return [Run(base + int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
