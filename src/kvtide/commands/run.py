"""`kvtide run`: start an engine under kvtide."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from kvtide.errors import UsageError
from kvtide.settings import Settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    # What comes after the engine's own name belongs to the engine, also without `--`.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The engine's command, after --: vllm serve MODEL.", show_default=False
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the instance.")] = None,
    limit: Annotated[
        str | None, typer.Option(help="Most that it may take of a device: 12GiB.")
    ] = None,
    minimum: Annotated[
        str | None, typer.Option("--min", help="What it can always get back: 4GiB.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option(help="Who gives way first: the lower number.")
    ] = None,
    headroom: Annotated[
        str | None, typer.Option(help="Bytes of a device to be left unclaimed by anybody.")
    ] = None,
    wait_deadline: Annotated[
        str | None, typer.Option(help="Seconds it waits for memory before it gives up.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Most that a device lends to all instances.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Size of the host device: 256MiB.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option("--dir", help="Directory of the ledgers.")
    ] = None,
) -> None:
    """Start an engine under kvtide. Options go before the engine's command; KVTIDE_* are kept."""
    given = {
        "name": name,
        "limit": limit,
        "min": minimum,
        "priority": priority,
        "headroom": headroom,
        "wait_deadline": wait_deadline,
        "budget": budget,
        "host_memory": host_memory,
        "dir": directory,
    }
    environ = dict(os.environ) | {"KVTIDE": "1"}
    environ |= {Settings.variable(k): v for k, v in given.items() if v is not None}
    Settings.from_environ(environ)  # refuse what is wrong before the engine starts
    path = shutil.which(command[0])
    if path is None:
        raise UsageError(f"there is no command {command[0]!r} here to run; is its environment on?")
    os.execve(path, command, environ)
