"""`kvtide top`: who holds what, live, in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtide.errors import UsageError
from kvtide.settings import Settings

if TYPE_CHECKING:
    from kvtide.top.state import Action, Term

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("top")(top)


def top(
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=60)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch the devices; keys sort, set limit, min, priority or headroom, and trim."""
    from kvtide.observe.watcher import Watcher

    directory = Settings.from_environ().dir
    watcher = Watcher(directory)
    if once:
        _print_once(watcher)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("kvtide top needs a terminal; kvtide top --once prints one frame")
    from kvtide.top.run import run

    run(watcher, interval, _change)


def _print_once(watcher: object) -> None:
    from rich.console import Console

    from kvtide.observe.watcher import Watcher
    from kvtide.top.frame import frame
    from kvtide.top.state import Chosen

    assert isinstance(watcher, Watcher)
    console = Console(highlight=False)
    sample = watcher.look()
    lines = sum(4 + len(device.instances) for device in sample.status.devices)
    picture = frame(sample, sample.events, Chosen(), console.size.width, max(24, lines + 8))
    console.print(picture, soft_wrap=True)


def _change(action: Action) -> str:
    from kvtide import control
    from kvtide.units import format_size

    if action.what == "trim":
        (done,) = control.trim(action.name, device=action.device, wait_seconds=0.5)
        freed = format_size(max(0, done.before_bytes - done.after_bytes))
        return f"{action.name} gave back {freed}"
    assert action.what != "quit"
    terms: dict[str, Any] = {action.what: _value(action.what, action.value)}
    control.set(action.name, **terms, revision=action.revision, device=action.device)
    return f"the {action.what} of {action.name} is {action.value} now"


def _value(term: Term, text: str) -> int | None:
    from kvtide.units import parse_size

    if term == "limit" and text == "none":
        return None
    if term != "priority":
        return parse_size(text)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"a priority is a number such as 2 or -1, not {text!r}") from None
