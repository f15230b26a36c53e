"""`kvtide limit`: set or lift the most that an instance may hold of a device."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtide.errors import LedgerError, UsageError
from kvtide.settings import Settings
from kvtide.units import format_size, parse_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("limit")(limit)


def limit(
    name: Annotated[str, typer.Argument(help="Name of the instance.", show_default=False)],
    size: Annotated[str, typer.Argument(help="12GiB, 512MiB, or none.", show_default=False)],
    revision: Annotated[
        int | None, typer.Option(help="Refuse if the limit was changed since this revision.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Only on this device; default: wherever it runs.")
    ] = None,
) -> None:
    """Set an instance's limit, at once: it gives back what it caches above it."""
    from kvtide.ledger import Ledger

    limit_bytes = None if size == "none" else parse_size(size)
    directory = Settings.from_environ().dir
    paths, others = [], set()
    for path in Ledger.existing(directory):
        with Ledger.read(path) as observer:
            snapshot = observer.snapshot()
        names = {instance.name for instance in snapshot.instances}
        if device in (None, snapshot.spec.uuid):
            if name in names:
                paths.append(path)
            others |= names
    if not paths:
        where = "" if device is None else f" on {device}"
        there = ", ".join(sorted(others)) or "none at all"
        raise LedgerError(f"no instance {name!r} runs{where}; there is {there} (in {directory})")
    if revision is not None and len(paths) > 1:
        raise UsageError("a revision is of one device: say which with --device")
    for path in paths:
        ledger = Ledger.attach(path)
        try:
            now = ledger.set_limit(name, limit_bytes, revision)
            shown = "none" if limit_bytes is None else format_size(limit_bytes)
            typer.echo(f"{name} on {ledger.spec.uuid}: limit {shown}, revision {now}")
        finally:
            ledger.close()
