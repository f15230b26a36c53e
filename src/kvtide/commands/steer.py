"""`kvtide set`, `limit`, `trim` and `evict`: who may hold how much, changed while engines run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.errors import UsageError
from kvtide.units import format_size, parse_size

if TYPE_CHECKING:
    from kvtide.control import Trimmed

__all__ = ["register"]

_Name = Annotated[str, typer.Argument(help="Name of the instance.", show_default=False)]
_Device = Annotated[
    str | None, typer.Option(help="Only on this device; default: wherever it runs.")
]
_Revision = Annotated[
    int | None, typer.Option(help="Refuse if the terms were changed since this revision.")
]
_Now = Annotated[bool, typer.Option("--now", help="Preempt running requests as well.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    for name, command in (("set", set_), ("limit", limit), ("trim", trim), ("evict", evict)):
        app.command(name)(command)


def set_(
    name: _Name,
    limit: Annotated[str | None, typer.Option(help="Ceiling: 12GiB, or none.")] = None,
    minimum: Annotated[
        str | None, typer.Option("--min", help="What it can always get back: 4GiB.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(help="Who gives way first: the lower number.")
    ] = None,
    headroom: Annotated[
        str | None, typer.Option(help="Bytes of the device to be left unclaimed by anybody.")
    ] = None,
    revision: _Revision = None,
    device: _Device = None,
) -> None:
    """Set an instance's limit, min, priority and headroom, at once; what is not given stays."""
    from kvtide import control

    if limit is None and minimum is None and priority is None and headroom is None:
        raise UsageError("nothing to set: give --limit, --min, --priority or --headroom")
    changed = control.set(
        name,
        limit=control.KEEP if limit is None else _size(limit),
        min=control.KEEP if minimum is None else parse_size(minimum),
        priority=control.KEEP if priority is None else priority,
        headroom=control.KEEP if headroom is None else parse_size(headroom),
        revision=revision,
        device=device,
    )
    for one in changed:
        terms = one.terms
        ceiling = "none" if terms.limit_bytes is None else format_size(terms.limit_bytes)
        typer.echo(
            f"{one.name} on {one.device}: limit {ceiling}, min {format_size(terms.min_bytes)}, "
            f"priority {terms.priority}, headroom {format_size(terms.headroom_bytes)}, revision "
            f"{one.revision}"
        )


def limit(
    name: _Name,
    size: Annotated[str, typer.Argument(help="12GiB, 512MiB, or none.", show_default=False)],
    now: _Now = False,
    revision: _Revision = None,
    device: _Device = None,
) -> None:
    """Set an instance's limit, at once: it gives back what it caches above it."""
    from kvtide import control

    for one in control.limit(name, _size(size), now=now, revision=revision, device=device):
        shown = "none" if one.terms.limit_bytes is None else format_size(one.terms.limit_bytes)
        typer.echo(f"{one.name} on {one.device}: limit {shown}, revision {one.revision}")


def trim(
    name: _Name,
    to: Annotated[str, typer.Option(help="What it may keep: 2GiB.")] = "0",
    now: _Now = False,
    device: _Device = None,
) -> None:
    """Have an instance give back, once, what it caches; it may grow again when it needs to."""
    from kvtide import control

    for one in control.trim(name, to=parse_size(to), now=now, device=device):
        typer.echo(
            f"{one.name} on {one.device}: {format_size(one.before_bytes)} before, "
            f"{format_size(one.after_bytes)} now{_why_left(one, now=now)}"
        )


def _why_left(one: Trimmed, *, now: bool) -> str:
    """Why an instance holds more than it was asked to trim to; empty if it does not."""
    if one.after_bytes <= one.to_bytes:
        return ""
    if one.done:
        instead = "" if now else ": --now preempts requests as well"
        return f"; what it holds above {format_size(one.to_bytes)} is in use{instead}"
    if one.answered:
        return "; more is to come"
    pids = " ".join(map(str, one.pids))
    return f"; it has not answered yet, and gives back what it can when it does (process {pids})"


def evict(name: _Name, device: _Device = None) -> None:
    """Remove what a dead instance has left in the ledger; one that lives is refused."""
    from kvtide import control

    for one in control.evict(name, device=device):
        pids = " ".join(map(str, one.pids))
        typer.echo(
            f"{one.name} on {one.device}: removed; {format_size(one.charged_bytes)} were charged "
            f"to it (process {pids})"
        )


def _size(text: str) -> int | None:
    return None if text == "none" else parse_size(text)
