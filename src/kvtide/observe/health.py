"""Are the ledgers and their directory sound, and does a record explain every holder of memory?"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvtide.device.census import holdings
from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import InstanceView, Ledger, Snapshot, State
from kvtide.ledger.directory import is_shared
from kvtide.observe.findings import Finding, note, ok, wrong
from kvtide.observe.tallies import leftovers, read_tally
from kvtide.observe.tally import Owner, tallies_of
from kvtide.units import MIB, format_size

__all__ = ["check_ledgers"]

_ROOM_BYTES = 4 * MIB
_OURS = re.compile(r".+\.(ledger|tally|wake)|serve(-\d+)?\.token|start-[0-9a-f]{16}\.(json|\d+)")


def check_ledgers(directory: Path) -> Iterator[Finding]:
    """Look at a directory of ledgers and at every ledger in it."""
    try:
        paths = Ledger.existing(directory)
    except LedgerError as error:
        yield wrong("directory", str(error), "mend it, or set KVTIDE_DIR to another one")
        return
    yield _check_room(directory)
    yield from _check_files(directory)
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


def _check_files(directory: Path) -> Iterator[Finding]:
    """Files of others, and such as kvtide never makes."""
    about = "files"
    entries = sorted(os.scandir(directory), key=lambda e: e.name) if directory.exists() else []
    for_group = directory.exists() and is_shared(directory.stat())
    for entry in entries:
        try:
            found = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() and not for_group:
            yield wrong(
                about,
                f"{entry.path} belongs to user {found.st_uid}",
                "remove it, or have its owner use a KVTIDE_DIR of their own",
            )
        elif entry.name.endswith(".token") and mode & 0o077:
            yield wrong(
                about,
                f"{entry.path} can be read by others (mode {mode:04o})",
                "remove it: kvtide serve makes a new one",
            )
        elif not _OURS.fullmatch(entry.name):
            yield note(about, f"{entry.path} is not kvtide's", "it does no harm; remove it")


def _check_ledger(path: Path) -> Iterator[Finding]:
    about = f"ledger {path.stem}"
    tallies = tallies_of(path)
    wakes = sorted(path.parent.glob(f"{path.stem}.*.wake"))
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
    living = sum(i.state is not State.DEAD for i in snapshot.instances)
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
    if snapshot.sampled_ns > time.monotonic_ns():
        yield note(
            about,
            "its last sample is from the future: made before a restart of this machine, or in a "
            "container with a clock of its own",
            "the next engine samples anew; engines of one device must share one clock",
        )
    for instance in snapshot.instances:
        yield from _check_instance(about, instance, tallies)
    yield from _check_leftovers(about, snapshot, tallies, wakes)
    if snapshot.spec.backend == "host":
        yield from _strangers(about, snapshot)


def _check_instance(
    about: str, instance: InstanceView, tallies: dict[Owner, Path]
) -> Iterator[Finding]:
    name = repr(instance.name)
    if instance.state is State.DEAD:
        yield note(
            about,
            f"{name} has died with {format_size(instance.charged_bytes)} charged",
            f"the next engine that needs memory, or starts, retires it; or: kvtide evict "
            f"{instance.name}",
        )
        return
    layouts = set()
    for pool in instance.pools:
        path = tallies.get(Owner.of_key("rank", pool.key))
        reading = None if path is None else read_tally(path)
        if reading is not None and reading.about:
            layouts.add(reading.about)
    if layouts:
        yield ok(about, f"{name} lays its KV cache out {', '.join(sorted(layouts))}")
    if instance.silent:
        yield wrong(
            about,
            f"{name} (process {instance.pid}) does not answer calls to give memory back",
            "look at that process: it may be stopped (state T), or hang",
        )
    quarantined_bytes = sum(pool.figures.quarantined_bytes for pool in instance.pools)
    if quarantined_bytes:
        yield wrong(
            about,
            f"{name} has {format_size(quarantined_bytes)} that its device did not take back",
            "restart it: the memory is of no use to anybody until then",
        )
    unbacked_bytes = instance.terms.min_bytes - instance.backed_min_bytes
    if unbacked_bytes > 0:
        yield wrong(
            about,
            f"{format_size(unbacked_bytes)} of the min of {name} is not backed by the budget",
            f"free memory outside kvtide, or lower mins: kvtide set {instance.name} --min SIZE",
        )


def _check_leftovers(
    about: str, snapshot: Snapshot, tallies: dict[Owner, Path], wakes: list[Path]
) -> Iterator[Finding]:
    left = [path.name for path in leftovers(snapshot, tallies)]
    live = {f"{slot}.{int(g):x}" for slot, g in (i.key.split(":") for i in snapshot.instances)}
    for path in wakes:
        slot_and_generation = ".".join(path.name.split(".")[-3:-1])
        if slot_and_generation not in live:
            left.append(path.name)
    if left:
        yield note(
            about,
            f"left by engines that were killed: {', '.join(sorted(left))}",
            "the next engine that starts removes them",
        )


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
