"""How much of a pool could be backed in any state of the ledger."""

from __future__ import annotations

from kvtide.pool import Geometry
from kvtide.ranks.seat import Seat

__all__ = ["bytes_of_first", "most_blocks"]


def bytes_of_first(geometry: Geometry, blocks: int) -> int:
    """Bytes that must be mapped so that the first so many blocks are backed, block 0 among them."""
    granules = covered = 0
    for first, end in sorted(geometry.granule_runs(0, blocks)):
        granules += max(0, end - max(first, covered))
        covered = max(covered, end)
    return granules * geometry.granularity_bytes


def most_blocks(geometry: Geometry, seat: Seat, ranks_on_device: int) -> int:
    """How many blocks can ever be backed, when all others have left; block 0 among them."""
    limit_bytes = seat.instance.limit_bytes
    ceiling_bytes = seat.ledger.spec.ceiling_bytes
    allowed_bytes = ceiling_bytes if limit_bytes is None else min(limit_bytes, ceiling_bytes)
    allowed_bytes //= ranks_on_device
    low, high = 0, geometry.blocks_total
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_of_first(geometry, middle) <= allowed_bytes:
            low = middle
        else:
            high = middle - 1
    return low
