"""`kvtide record` and `kvtide plot`: what memory did over time, as a trace and as a picture."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvtide.errors import KvtideError
from kvtide.settings import Settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command("record")(record)
    app.command("plot")(plot)


def record(
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace that is written.")],
    seconds: Annotated[
        float | None, typer.Option(help="How long; default: until interrupted.", min=0)
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.01, max=60)
    ] = 0.2,
    past: Annotated[
        bool, typer.Option("--past", help="With what engines still remember from before.")
    ] = False,
) -> None:
    """Record every event and what everybody holds, as a trace for ui.perfetto.dev or plot."""
    from kvtide.observe.recording import Recorder
    from kvtide.observe.watcher import Watcher

    watcher = Watcher(Settings.from_environ().dir, past=past)
    stop = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        with out.open("w", encoding="utf-8") as file:
            recorder = Recorder(file)
            while True:
                recorder.add(watcher.look())
                left = interval
                if deadline is not None:
                    left = min(interval, deadline - time.monotonic())
                if left <= 0 or stop.wait(left):
                    break
            recorder.add(watcher.look())
            recorder.end()
    except OSError as error:
        raise KvtideError(f"{out} cannot be written: {error.strerror}") from error
    typer.echo(f"{out}: {recorder.samples} looks, {recorder.events} events")


def plot(
    recording: Annotated[Path, typer.Argument(help="What kvtide record wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .html, .png or .svg.")] = Path(
        "memory.html"
    ),
) -> None:
    """Draw a recording: who held how much over time."""
    from kvtide.observe.picture import draw
    from kvtide.observe.recording import read_recording

    draw(read_recording(recording), out)
    typer.echo(str(out))
