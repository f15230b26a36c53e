"""Plans of a pool as the orders of ranks: granules become bytes."""

from __future__ import annotations

from collections.abc import Sequence

from kvtide.pool import Run, Split
from kvtide.ranks.messages import Parting, Place

__all__ = ["parting", "places", "runs"]


def places(extents: Sequence[Run], granule_bytes: int) -> tuple[Place, ...]:
    """Runs of granules in bytes."""
    return tuple([(first * granule_bytes, count * granule_bytes) for first, count in extents])


def runs(of: Sequence[Place], granule_bytes: int) -> list[Run]:
    """Places as runs of granules."""
    return [Run(offset // granule_bytes, size // granule_bytes) for offset, size in of]


def parting(split: Split, granule_bytes: int) -> Parting:
    """A split in bytes."""
    (whole,) = places((split.extent,), granule_bytes)
    staging = tuple(granule * granule_bytes for granule in split.staging)
    return whole, places(split.keep, granule_bytes), staging
