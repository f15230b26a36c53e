"""Holding what was really allocated against a budget, and against a plan, line by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.sizing.rows import Allocation
from kvtide.sizing.table import allocation_table
from kvtide.units import format_size

__all__ = ["Line", "Verdict", "check", "compare"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether allocations fit a budget. `table` lists them; `message` says what to do if not."""

    fits: bool
    allocated_bytes: int
    budget_bytes: int
    table: str
    message: str


def check(allocations: Sequence[Allocation], budget_bytes: int, *, who: str = "engine") -> Verdict:
    """Hold the sum of what is allocated, not what was configured, against the budget.

    Parameters
    ----------
    allocations
        What the engine really asked for, one item a call; `rows.Allocation`.
    who
        The instance, for the message.
    """
    allocated = sum(allocation.bytes for allocation in allocations)
    table = allocation_table(allocations)
    if allocated <= budget_bytes:
        message = f"{who} allocates {format_size(allocated)} of {format_size(budget_bytes)}"
    else:
        message = (
            f"{who} would allocate {allocated} bytes ({format_size(allocated)}) for KV and state; "
            f"its budget is {budget_bytes} bytes ({format_size(budget_bytes)}), "
            f"{format_size(allocated - budget_bytes)} less. Refused: raise the budget, or ask for "
            f"fewer tokens or sequences. What it would allocate:\n{table}"
        )
    return Verdict(allocated <= budget_bytes, allocated, budget_bytes, table, message)


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of memory, planned and found, in bytes. `differs`: by more than the tolerance."""

    kind: str
    planned_bytes: int
    found_bytes: int
    differs: bool


def compare(
    planned: Mapping[str, int], found: Mapping[str, int], *, tolerance: float = 0.01
) -> list[Line]:
    """Lay bytes by kind beside each other: the planned kinds first, then those only found."""
    lines = []
    for kind in dict.fromkeys((*planned, *found)):
        want, have = planned.get(kind, 0), found.get(kind, 0)
        lines.append(Line(kind, want, have, abs(have - want) > tolerance * want))
    return lines
