"""`kvtide demo`: two real servers share one small device, and you see memory move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("demo")(demo)


def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for memory.png, demo.json and the servers' logs.")
    ] = Path("demo-out"),
) -> None:
    """Run two vLLM servers on one host device of 256 MiB; exit 0 only if every check held."""
    from kvtide.verify.demo import run_demo

    if not run_demo(out):
        raise typer.Exit(1)
