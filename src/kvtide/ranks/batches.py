"""Plans of a pool as the orders of ranks: granules become bytes, large plans several orders."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.pool import Run, Shrink, Split
from kvtide.ranks.messages import Parting, Place

__all__ = ["batches", "parting", "places", "runs"]

# Extents as large as this are refunded alone, smaller ones in batches below it.
_REFUND_BYTES = 64 << 20


def places(extents: Sequence[Run], granule_bytes: int) -> tuple[Place, ...]:
    """Runs of granules in bytes."""
    return tuple((run.first * granule_bytes, run.granules * granule_bytes) for run in extents)


def runs(of: Sequence[Place], granule_bytes: int) -> list[Run]:
    """Places as runs of granules."""
    return [Run(offset // granule_bytes, size // granule_bytes) for offset, size in of]


def parting(split: Split, granule_bytes: int) -> Parting:
    """A split in bytes."""
    (whole,) = places((split.extent,), granule_bytes)
    staging = tuple(granule * granule_bytes for granule in split.staging)
    return whole, places(split.keep, granule_bytes), staging


def batches(shrinks: Sequence[Shrink], granule_bytes: int) -> list[list[Shrink]]:
    """Cut plans, one a shape, into orders that are refunded one by one."""
    if any(shrink.splits for shrink in shrinks):
        # The whole extents' memory carries the splits: it is withheld until they are done.
        return [list(shrinks)]
    parts = [_parts(shrink, _REFUND_BYTES // granule_bytes) for shrink in shrinks]
    longest = max(len(p) for p in parts)
    return [[p[i] if i < len(p) else Shrink(()) for p in parts] for i in range(longest)]


def _parts(shrink: Shrink, limit: int) -> list[Shrink]:
    parts: list[Shrink] = []
    batch: list[Run] = []
    held = 0
    for run in shrink.extents:
        if batch and held + run.granules > limit:
            parts.append(Shrink(tuple(batch)))
            batch, held = [], 0
        batch.append(run)
        held += run.granules
    parts.append(Shrink(tuple(batch)))
    return parts
