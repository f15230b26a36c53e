"""Which requests to preempt so that extents come free: the fewest tokens lost for the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.pool.extents import Extents
from kvtide.pool.geometry import Indices

__all__ = ["Candidate", "choose_victims"]


class Candidate(NamedTuple):
    """A running request: the blocks that nobody else holds, and the tokens to compute again."""

    blocks: Sequence[int]
    tokens: int


class _Counts:
    """Of one rank's granules: how many live blocks touch each, in all and of each candidate."""

    def __init__(
        self, extents: Extents, live: npt.NDArray[np.bool_], candidates: Sequence[Candidate]
    ) -> None:
        self._extents = extents
        self._all = self._count(np.flatnonzero(live))
        self._own = []
        for candidate in candidates:
            counts = self._count(np.asarray(candidate.blocks, np.int64))
            where = np.flatnonzero(counts)
            self._own.append((where, counts[where]))

    def _count(self, blocks: Indices) -> Indices:
        geometry = self._extents.geometry
        marks = np.zeros(geometry.granules_total + 1, np.int64)
        for strip in geometry.strips:
            first, last = geometry.granules_of(blocks, strip)
            np.add.at(marks, first, 1)
            np.add.at(marks, last + 1, -1)
        return np.cumsum(marks[:-1])

    def gain(self, i: int) -> int:
        """Granules that hold nothing live once this candidate is gone."""
        where, own = self._own[i]
        return int(np.count_nonzero(self._all[where] == own))

    def take(self, i: int) -> None:
        where, own = self._own[i]
        self._all[where] -= own


def choose_victims(
    shapes: Sequence[Extents],
    live: npt.NDArray[np.bool_],
    candidates: Sequence[Candidate],
    wanted_granules: Sequence[int],
) -> list[int]:
    """Choose requests until so many granules of each shape hold nothing live, if that can be.

    One request alone, the cheapest, where one is enough; else those that free most for each token
    that has to be computed again. Ties go to the last.

    Returns
    -------
    list of int
        Indices into the candidates, in the order of choice.
    """
    counts = [_Counts(shape, live, candidates) for shape in shapes]
    left, missing = list(range(len(candidates))), list(wanted_granules)
    chosen: list[int] = []
    while left and any(m > 0 for m in missing):
        gains = {i: [c.gain(i) for c in counts] for i in left}
        enough = [i for i in left if all(g >= m for g, m in zip(gains[i], missing, strict=True))]
        if enough:
            best = min(enough, key=lambda i: (candidates[i].tokens, -i))
        else:
            best = max(left, key=lambda i: (sum(gains[i]) / (candidates[i].tokens + 1), i))
        chosen.append(best)
        left.remove(best)
        for c in counts:
            c.take(best)
        missing = [m - g for m, g in zip(missing, gains[best], strict=True)]
    return chosen
