"""The figures of each rank's pool, as others see them: they ask for idle memory by these."""

from __future__ import annotations

from typing import Generic, TypeVar

from kvtide.ledger import PoolFigures
from kvtide.pool import Block, Pool
from kvtide.ranks.changes import Changes, Circulation
from kvtide.ranks.giving import Giving
from kvtide.ranks.ranks import Ranks

__all__ = ["Figures"]

B = TypeVar("B", bound=Block)


class Figures(Generic[B]):
    """What one engine publishes. `pinned_bytes`, of each shape, is what never goes."""

    def __init__(
        self, ranks: Ranks, pool: Pool, circulation: Circulation[B], changes: Changes[B]
    ) -> None:
        self._ranks = ranks
        self._pool = pool
        self._circulation = circulation
        self._changes = changes
        self._block_bytes = [shape.geometry.block_bytes for shape in pool.shapes]
        self.pinned_bytes = [0] * len(pool.shapes)

    def publish(self, giving: Giving[B]) -> None:
        """Tell all ledgers; plain stores, no lock."""
        free, cached = self._circulation.free.count, self._circulation.cached_count
        usable, idle = self._pool.usable_count, giving.idle_blocks
        for member in self._ranks.members:
            shape = self._pool.shapes[member.shape]
            member.account.publish(
                PoolFigures(
                    blocks_mapped=usable,
                    blocks_used=max(0, usable - free - cached),
                    blocks_cached=cached,
                    extents=len(shape.mapped),
                    idle_bytes=min(idle * self._block_bytes[member.shape], shape.mapped_bytes),
                    releasing_bytes=self._changes.releasing_bytes(member.shape),
                    pinned_bytes=self.pinned_bytes[member.shape],
                    quarantined_bytes=self._changes.quarantined_bytes[member.rank],
                )
            )
