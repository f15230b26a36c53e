"""Runs `kvtide top` in a terminal: looks, draws, reads keys."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from kvtide.errors import KvtideError
from kvtide.observe.watcher import Event, Watcher
from kvtide.top.frame import frame
from kvtide.top.state import Action, Chosen, press, settled

__all__ = ["keys_in", "run"]

_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}
_KEPT_EVENTS = 50


def keys_in(text: str) -> Iterator[str]:
    """The keys in what a terminal sent."""
    at = 0
    while at < len(text):
        for length in (3, 1):
            if text[at : at + length] in _SEQUENCES:
                yield _SEQUENCES[text[at : at + length]]
                at += length
                break
        else:
            yield "escape" if text[at] == "\x1b" else text[at]
            at += 1


@contextmanager
def _keyboard() -> Iterator[int]:
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def run(watcher: Watcher, interval: float, change: Callable[[Action], str]) -> None:
    """Draw until the user quits. `change` carries out an action and says what became of it."""
    console = Console(highlight=False)
    events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
    chosen = Chosen()
    with _keyboard() as fd, Live(console=console, screen=True, auto_refresh=False) as live:
        sample = watcher.look()
        next_look = time.monotonic() + interval
        while True:
            events += sample.events
            chosen = settled(chosen, sample.status)
            width, height = console.size
            live.update(frame(sample, tuple(events), chosen, width, height), refresh=True)
            pause = max(0.0, next_look - time.monotonic())
            readable, _, _ = select.select([fd], [], [], pause)
            if readable:
                for key in keys_in(os.read(fd, 64).decode(errors="ignore")):
                    chosen, action = press(chosen, key, sample.status)
                    if action is None:
                        continue
                    if action.what == "quit":
                        return
                    try:
                        chosen = replace(chosen, said=change(action))
                    except KvtideError as error:
                        chosen = replace(chosen, said=str(error))
            if readable or time.monotonic() >= next_look:
                sample = watcher.look()
                next_look = time.monotonic() + interval
