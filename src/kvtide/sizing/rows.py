"""The one sum: every allocation of a rank for a number of blocks, and what inverts that sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["UNBOUNDED", "Allocation", "Row", "allocations", "invert", "stages", "total_bytes"]

# Blocks of a rank on which nothing grows with them: another rank decides.
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Allocation:
    """One thing that is allocated on a rank.

    `layers` are the engine's names of the layers that use these bytes (they take turns on them
    where there are several); `count` counts blocks, tokens or states.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """An allocation before the number of blocks is known: `count(blocks)` units of some bytes."""

    name: str
    kind: str
    layers: tuple[str, ...]
    unit_bytes: int
    count: Callable[[int], int]


def allocations(rows: Sequence[Row], blocks: int) -> tuple[Allocation, ...]:
    """What is allocated for `blocks` blocks; their bytes sum to `total_bytes`."""
    return tuple(
        Allocation(row.name, row.kind, row.layers, count, count * row.unit_bytes)
        for row in rows
        if (count := row.count(blocks)) and row.unit_bytes
    )


def total_bytes(rows: Sequence[Row], blocks: int) -> int:
    """The sum of everything that is allocated for `blocks` blocks; it never falls with them."""
    return sum(row.unit_bytes * row.count(blocks) for row in rows)


def invert(rows: Sequence[Row], budget_bytes: int) -> int:
    """The most blocks whose sum is at most the budget: -1 where not even none fit.

    `UNBOUNDED` where the sum does not grow.
    """
    if total_bytes(rows, 0) > budget_bytes:
        return -1
    if total_bytes(rows, UNBOUNDED) <= budget_bytes:
        return UNBOUNDED
    fits, too_many = 0, 1
    while total_bytes(rows, too_many) <= budget_bytes:
        fits, too_many = too_many, too_many * 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if total_bytes(rows, middle) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


def stages(num_layers: int, pp: int) -> list[range]:
    """The decoder layers of each pipeline stage, as vLLM and SGLang both split them.

    What is left over goes one each to the last stages but the very last.
    """
    each, left = divmod(num_layers, pp)
    sizes = [each] * pp
    for i in range(2, left + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
