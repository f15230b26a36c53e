"""Blocks that grow and shrink over an arena, on one account of the ledger."""

from kvtide.pool.extents import Extents
from kvtide.pool.free import Block, FreeBlocks
from kvtide.pool.geometry import Geometry, Strip
from kvtide.pool.plans import Growth, Run, Shrink, Split
from kvtide.pool.pool import Pool, Reclaim, Splits
from kvtide.pool.reclaim import Standing

__all__ = [
    "Block",
    "Extents",
    "FreeBlocks",
    "Geometry",
    "Growth",
    "Pool",
    "Reclaim",
    "Run",
    "Shrink",
    "Split",
    "Splits",
    "Standing",
    "Strip",
]
