"""Samples and events of all devices, one look after another: for top, serve and record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import Ledger, Snapshot
from kvtide.observe.logs import event_text
from kvtide.observe.outside import outside_now_bytes
from kvtide.observe.snapshot import DeviceStatus, InstanceStatus, Status, device_status
from kvtide.observe.tallies import Reading, read_tally, wall_ns
from kvtide.observe.tally import CAUSE_NAMES, KIND_NAMES, Owner, tallies_of
from kvtide.units import format_size

__all__ = ["Counters", "Event", "Sample", "Watcher"]


class Event(msgspec.Struct, frozen=True):
    """Something that happened to an instance. `time` is in seconds since 1970.

    `kind` is one of a tally's, or appear, vanish, state or limit, which observers find by
    comparing. `detail` is nanoseconds waited (resume) or a number of extents (split).
    """

    time: float
    device: str
    instance: str
    kind: str
    cause: str
    bytes: int
    detail: int
    text: str


class Counters(msgspec.Struct, frozen=True):
    """One process's tally: of an instance's scheduler (rank None), or of one of its ranks."""

    device: str
    instance: str
    rank: int | None
    reading: Reading


class Sample(msgspec.Struct, frozen=True):
    """One look. `troubles` are ledgers that could not be read, in words."""

    time: float
    status: Status
    events: tuple[Event, ...]
    counters: tuple[Counters, ...]
    troubles: tuple[str, ...]


class Watcher:
    """Looks at a directory of ledgers. Takes no lock.

    Parameters
    ----------
    directory
        Of the ledgers.
    past
        Whether the first look tells what happened before it, as far as that is kept.
    """

    def __init__(self, directory: Path, *, past: bool = True) -> None:
        self._directory = directory
        self._past = past
        self._seen: dict[Path, int] = {}
        self._before: dict[str, dict[str, InstanceStatus]] = {}
        self._devices: dict[Path, DeviceStatus] = {}
        self._first = True

    def look(self) -> Sample:
        """See how things are and what happened since the last look.

        Raises
        ------
        LedgerError
            The directory cannot be trusted.
        """
        now = time.time()
        events: list[Event] = []
        counters: list[Counters] = []
        troubles = []
        found: dict[Path, DeviceStatus] = {}
        for path in Ledger.existing(self._directory):
            try:
                tallies = tallies_of(path)
                with Ledger.read(path) as observer:
                    snapshot = observer.snapshot()
            except LedgerBusyError as error:
                troubles.append(str(error))
                if path in self._devices:  # as it was
                    found[path] = self._devices[path]
                continue
            except LedgerError as error:
                troubles.append(str(error))
                continue
            device = device_status(snapshot, outside_now_bytes(snapshot))
            found[path] = device
            events += self._changes(now, device)
            for counter, noted in self._tallies(snapshot, tallies):
                counters.append(counter)
                events += noted
        self._devices = found
        self._before = {d.device: {i.key: i for i in d.instances} for d in found.values()}
        self._first = False
        events.sort(key=lambda event: event.time)
        status = Status(tuple(found[path] for path in sorted(found)))
        return Sample(now, status, tuple(events), tuple(counters), tuple(troubles))

    def _tallies(
        self, snapshot: Snapshot, tallies: dict[Owner, Path]
    ) -> Iterator[tuple[Counters, list[Event]]]:
        device = snapshot.spec.uuid
        for instance in snapshot.instances:
            owners: list[tuple[Owner, int | None]] = [(Owner.of_key("engine", instance.key), None)]
            owners += [(Owner.of_key("rank", pool.key), pool.rank) for pool in instance.pools]
            for owner, rank in owners:
                path = tallies.get(owner)
                reading = None if path is None else self._read(path)
                if reading is None:
                    continue
                noted = [
                    Event(
                        wall_ns(e.time_ns) / 1e9,
                        device,
                        instance.name,
                        e.kind,
                        e.cause,
                        e.size_bytes,
                        e.detail,
                        _text(e.kind, e.cause, e.size_bytes, e.detail),
                    )
                    for e in reading.events
                ]
                yield Counters(device, instance.name, rank, reading), noted

    def _read(self, path: Path) -> Reading | None:
        reading = read_tally(path, self._seen.get(path, 0))
        if reading is None:
            return None
        skipped = self._first and not self._past
        self._seen[path] = reading.head
        return reading._replace(events=()) if skipped else reading

    def _changes(self, now: float, device: DeviceStatus) -> Iterator[Event]:
        before = self._before.get(device.device, {})
        here = {instance.key: instance for instance in device.instances}

        def event(
            instance: InstanceStatus, kind: str, cause: str, size_bytes: int, text: str
        ) -> Event:
            return Event(now, device.device, instance.name, kind, cause, size_bytes, 0, text)

        if not self._first:
            for key, old in before.items():
                if key not in here:
                    held = format_size(old.charged_bytes)
                    text = f"is gone; it held {held}"
                    yield event(old, "vanish", "ended", old.charged_bytes, text)
        for key, new in here.items():
            past = before.get(key)
            if past is None:
                if not self._first:
                    yield event(new, "appear", "started", 0, "has appeared")
                continue
            if new.state != past.state:
                yield event(new, "state", new.state, 0, f"is {new.state}")
            if new.limit_revision != past.limit_revision:
                limit_bytes = new.limit_bytes
                shown = "none" if limit_bytes is None else format_size(limit_bytes)
                yield event(new, "limit", "set", limit_bytes or 0, f"has a new limit: {shown}")


def _text(kind: str, cause: str, size_bytes: int, detail: int) -> str:
    if kind in KIND_NAMES and cause in CAUSE_NAMES:
        return event_text(KIND_NAMES.index(kind), CAUSE_NAMES.index(cause), size_bytes, detail)
    return f"{kind} {format_size(size_bytes)} ({cause})"
