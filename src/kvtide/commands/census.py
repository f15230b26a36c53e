"""`kvtide census`: what a running instance really allocated, beside its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.settings import Settings
from kvtide.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.observe.census import CensusLine, RankCensus

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("census")(census)


def census(
    name: Annotated[str, typer.Argument(help="Name of the instance.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Lay what an instance allocated beside its plan; lines that differ by over 1% are marked."""
    import msgspec

    from kvtide.observe.census import take_census

    found = take_census(Settings.from_environ().dir, name)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    if not found.ranks:
        typer.echo(f"no worker of {found.name} holds memory yet: it is still starting")
    for rank in found.ranks:
        typer.echo(_text(found.name, rank))


def _text(name: str, rank: RankCensus) -> str:
    budget = (
        "no budget" if rank.budget_bytes is None else f"budget {format_size(rank.budget_bytes)}"
    )
    held = f"{format_size(rank.charged_bytes)} charged, {format_size(rank.mapped_bytes)} mapped"
    if rank.kernel_bytes is not None:
        held += f", {format_size(rank.kernel_bytes)} by the kernel"
    lines = [
        f"{name}, rank {rank.rank} on {rank.device} (process {rank.pid}): {budget}",
        f"now {held}",
    ]
    if rank.source is not None:
        lines.append(f"by {rank.source}; KV and state are addresses, backed where blocks live")
    if rank.unplanned is not None:
        lines.append(f"no plan to compare with: {rank.unplanned}")
    lines += ["", _table("kind", rank.kinds), "", _table("allocation", rank.allocations), ""]
    return "\n".join(lines)


def _table(title: str, lines: Sequence[CensusLine]) -> str:
    from kvtide.sizing.table import columns

    rows = [(title, "planned", "found", "")]
    for line in lines:
        planned = "-" if line.planned_bytes is None else format_size(line.planned_bytes)
        mark = "DIFFERS" if line.differs else ""
        rows.append((line.name, planned, format_size(line.found_bytes), mark))
    return columns(rows, right=(1, 2))
