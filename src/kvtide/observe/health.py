"""Are the ledgers and their directory sound, and does a record explain every holder of memory?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvtide.device.census import holdings
from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import Ledger, Snapshot, State
from kvtide.observe.findings import Finding, note, ok, wrong
from kvtide.units import MIB, format_size

__all__ = ["check_ledgers"]

_ROOM_BYTES = 4 * MIB


def check_ledgers(directory: Path) -> Iterator[Finding]:
    """Look at a directory of ledgers and at every ledger in it."""
    try:
        paths = Ledger.existing(directory)
    except LedgerError as error:
        yield wrong("directory", str(error), "mend it, or set KVTIDE_DIR to another one")
        return
    yield _check_room(directory)
    for path in paths:
        yield from _check_ledger(path)


def _check_room(directory: Path) -> Finding:
    there = directory
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        return wrong(
            "directory",
            f"{there} cannot be written to",
            "set KVTIDE_DIR to a directory of your own",
        )
    disk = os.statvfs(there)
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < _ROOM_BYTES:
        return wrong(
            "directory",
            f"{there} has {format_size(free_bytes)} free",
            f"make room for at least {format_size(_ROOM_BYTES)}, or set another KVTIDE_DIR",
        )
    state = "is sound" if there == directory else "will be made by the first engine"
    return ok("directory", f"{directory} {state}")


def _check_ledger(path: Path) -> Iterator[Finding]:
    about = f"ledger {path.stem}"
    try:
        with Ledger.read(path) as observer:
            snapshot = observer.snapshot()
    except LedgerBusyError as error:
        advice = "look at that process: a stopped one (state T) holds up every engine here"
        yield wrong(about, str(error), advice)
        return
    except LedgerError as error:
        advice = f"stop the engines of this device, remove {path}, and start them again"
        yield wrong(about, str(error), advice)
        return
    dead = [i for i in snapshot.instances if i.state is State.DEAD]
    living = len(snapshot.instances) - len(dead)
    yield ok(
        about,
        f"{living} instance{'' if living == 1 else 's'}, "
        f"{format_size(snapshot.charged_bytes)} charged of {format_size(snapshot.budget_bytes)}",
    )
    if snapshot.charged_bytes > snapshot.budget_bytes:
        yield note(
            about,
            "more is charged than the budget: memory outside kvtide has grown",
            "nothing more is granted until engines give back or that memory is freed",
        )
    for instance in dead:
        yield note(
            about,
            f"{instance.name!r} has died with {format_size(instance.charged_bytes)} charged",
            "the next engine that needs memory, or starts, retires it",
        )
    if snapshot.spec.backend == "host":
        yield from _strangers(about, snapshot)


def _strangers(about: str, snapshot: Snapshot) -> Iterator[Finding]:
    known = {pool.pid for instance in snapshot.instances for pool in instance.pools}
    held: dict[int, int] = {}
    for holding in holdings(snapshot.spec.uuid):
        if holding.pid not in known and holding.size_bytes:
            held[holding.pid] = held.get(holding.pid, 0) + holding.size_bytes
    for pid, size_bytes in sorted(held.items()):
        yield note(
            about,
            f"process {pid} holds {format_size(size_bytes)} that no record explains",
            "it lowers what can be lent; if it should not be there, end it",
        )
