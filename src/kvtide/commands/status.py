"""`kvtide status`: who holds how much of each device now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvtide.settings import Settings
from kvtide.units import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvtide.observe.snapshot import DeviceStatus, InstanceStatus

__all__ = ["register"]

_WIDEST = 1000


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("status")(status)


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Show every device that has a ledger, and who holds how much of it."""
    import msgspec
    from rich.console import Console

    from kvtide.observe.snapshot import observe

    settings = Settings.from_environ()
    found = observe(settings.dir)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    if not found.devices:
        typer.echo(f"no engine has run under kvtide yet (no ledger in {settings.dir})")
        return
    # A figure cut in two would be read as another one: a line may be longer than a terminal.
    console = Console(highlight=False, width=_WIDEST)
    for device in found.devices:
        console.print(_heading(device), soft_wrap=True)
        if device.instances:
            console.print(_table(device), crop=False)
        for note in filter(None, map(_note, device.instances)):
            console.print(note, soft_wrap=True)


def _heading(device: DeviceStatus) -> str:
    return (
        f"{device.device} ({device.backend}, {format_size(device.total_bytes)}): "
        f"{format_size(device.charged_bytes)} charged of {format_size(device.budget_bytes)}, "
        f"{format_size(device.free_bytes)} free"
    )


def _table(device: DeviceStatus) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, collapse_padding=True)
    table.add_column("instance", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("charged", "mapped", "limit", "in use", "cached", "blocks", "pids"):
        table.add_column(title, justify="right", no_wrap=True)
    for instance in device.instances:
        table.add_row(*_row(instance))
    return table


def _row(instance: InstanceStatus) -> tuple[str, ...]:
    pools = instance.pools
    return (
        instance.name,
        instance.state,
        format_size(instance.charged_bytes),
        format_size(instance.mapped_bytes),
        "none" if instance.limit_bytes is None else format_size(instance.limit_bytes),
        str(sum(p.blocks_used for p in pools)),
        str(sum(p.blocks_cached for p in pools)),
        f"{sum(p.blocks_mapped for p in pools)}/{sum(p.blocks_total for p in pools)}",
        " ".join(str(pid) for pid in sorted({p.pid for p in pools})),
    )


def _note(instance: InstanceStatus) -> str:
    """What is out of the ordinary with an instance, in words; empty if nothing is."""
    parts = []
    if instance.priority:
        parts.append(f"priority {instance.priority}")
    if instance.min_bytes:
        unbacked_bytes = instance.min_bytes - instance.backed_min_bytes
        lacks = f" ({format_size(unbacked_bytes)} unbacked)" if unbacked_bytes else ""
        parts.append(f"min {format_size(instance.min_bytes)}{lacks}")
    if instance.headroom_bytes:
        parts.append(f"headroom {format_size(instance.headroom_bytes)}")
    if instance.loading_bytes:
        parts.append(f"{format_size(instance.loading_bytes)} still to load")
    if instance.waiting_bytes:
        parts.append(f"waits for {format_size(instance.waiting_bytes)}")
    if instance.silent:
        parts.append("does not answer, and is passed over")
    return f"{instance.name}: {', '.join(parts)}" if parts else ""
