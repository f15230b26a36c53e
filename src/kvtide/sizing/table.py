"""Allocations as a table for people: like ones folded into one line, sizes in GiB."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvtide.sizing.rows import Allocation
from kvtide.units import format_gib

__all__ = ["allocation_table", "columns"]


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Lay rows of text out in columns, those in `right` flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _folded(allocations: Sequence[Allocation]) -> list[list[Allocation]]:
    """Allocations of one kind, count and size together, in order of appearance."""

    def alike(allocation: Allocation) -> tuple[str, int, int, int]:
        return (allocation.kind, len(allocation.layers), allocation.count, allocation.bytes)

    order = list(dict.fromkeys(alike(allocation) for allocation in allocations))
    ranked = sorted(allocations, key=lambda allocation: order.index(alike(allocation)))
    return [list(members) for _, members in groupby(ranked, key=alike)]


def allocation_table(allocations: Sequence[Allocation]) -> str:
    """A table: what, of which kind, how many alike, units in each, GiB each and together."""
    rows = [("allocation", "kind", "alike", "layers", "count", "GiB each", "GiB")]
    for members in _folded(allocations):
        first = members[0]
        name = first.name if len(members) == 1 else f"{first.name} ..."
        rows.append(
            (
                name,
                first.kind,
                str(len(members)),
                str(sum(len(member.layers) for member in members)),
                str(first.count),
                format_gib(first.bytes),
                format_gib(sum(member.bytes for member in members)),
            )
        )
    total = format_gib(sum(allocation.bytes for allocation in allocations))
    layers = str(len({name for allocation in allocations for name in allocation.layers}))
    rows.append(("sum", "", str(len(allocations)), layers, "", "", total))
    return columns(rows, right=(2, 3, 4, 5, 6))
