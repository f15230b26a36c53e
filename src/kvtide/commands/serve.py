"""`kvtide serve`: a page, metrics and an API, on this machine's loopback address."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import typer

from kvtide.errors import UnsupportedError, UsageError
from kvtide.settings import Settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("serve")(serve)


def serve(
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8470,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.05, max=3600)
    ] = 1.0,
) -> None:
    """Show the devices in a browser, to Prometheus and to programs; changes need a token."""
    try:
        from kvtide.serve.run import run
    except ImportError as error:
        raise UnsupportedError(
            f"kvtide serve needs more packages ({error.name}): pip install 'kvtide[serve]'"
        ) from None
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UsageError(
            f"{host!r} is not a loopback address, such as 127.0.0.1 or ::1; to see it from "
            "elsewhere, forward the port: ssh -L 8470:127.0.0.1:8470 MACHINE"
        )
    run(Settings.from_environ().dir, host, port, interval)
