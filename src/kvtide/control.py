"""Steering instances from outside: one implementation for the commands, Python and an HTTP API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from kvtide.errors import LedgerError, NoInstanceError, UsageError
from kvtide.ledger import InstanceView, Ledger, Snapshot, State, Terms
from kvtide.settings import Settings
from kvtide.units import format_size

__all__ = ["KEEP", "Changed", "Evicted", "Trimmed", "evict", "limit", "set", "snapshot", "trim"]

_LOOK_S: Final = 0.02
_DYING_S: Final = 1.0


class _Keep(Enum):
    KEEP = "as it is"


KEEP: Final = _Keep.KEEP
"""In place of a value: leave it as it is."""


class Changed(NamedTuple):
    """An instance's terms on one device as they are now, and their revision."""

    device: str
    name: str
    terms: Terms
    revision: int


class Trimmed(NamedTuple):
    """What an instance was charged with on one device before and after, and what was asked.

    Attributes
    ----------
    done
        It has given what it can.
    answered
        It has begun to, or has given something.
    pids
        Of its processes.
    """

    device: str
    name: str
    before_bytes: int
    after_bytes: int
    to_bytes: int
    done: bool
    answered: bool
    pids: tuple[int, ...]


class Evicted(NamedTuple):
    """What a dead instance's records on one device still answered for."""

    device: str
    name: str
    charged_bytes: int
    pids: tuple[int, ...]


def set(
    name: str,
    *,
    limit: int | _Keep | None = KEEP,
    min: int | _Keep = KEEP,
    priority: int | _Keep = KEEP,
    headroom: int | _Keep = KEEP,
    revision: int | None = None,
    device: str | None = None,
    directory: Path | None = None,
) -> list[Changed]:
    """Set an instance's terms, at once, wherever it runs.

    Parameters
    ----------
    name
        Of the instance.
    limit, min, headroom
        Bytes; a limit of None is none.
    priority
        From -1000 to 1000.
    revision
        Refuse if the terms were set since this one; needs a device where there are several.
    device
        Only on this one.
    directory
        Of the ledgers; default: KVTIDE_DIR.

    Raises
    ------
    NoInstanceError
        No such instance runs.
    LedgerError
        The budget does not back the mins any more.
    StaleRevisionError
        The revision is not the current one.
    UsageError
        The terms cannot be had.
    """

    def change(terms: Terms) -> Terms:
        return Terms(
            terms.limit_bytes if limit is KEEP else limit,
            terms.min_bytes if min is KEEP else min,
            terms.priority if priority is KEEP else priority,
            terms.headroom_bytes if headroom is KEEP else headroom,
        )

    with _ledgers_of(name, device, directory) as ledgers:
        if revision is not None and len(ledgers) > 1:
            raise UsageError("a revision is of one device: say which (--device)")
        return [
            Changed(ledger.spec.uuid, name, *ledger.set_terms(name, change, revision))
            for ledger in ledgers
        ]


def limit(
    name: str,
    size: int | None,
    *,
    now: bool = False,
    revision: int | None = None,
    device: str | None = None,
    directory: Path | None = None,
) -> list[Changed]:
    """Set an instance's ceiling. Growth above it stops at once, and what is idle above it goes.

    What requests hold above it goes as they end; with `now` the engine preempts them. Parameters
    and errors are those of `set`.
    """
    changed = set(name, limit=size, revision=revision, device=device, directory=directory)
    if now and size is not None:
        with _ledgers_of(name, device, directory) as ledgers:
            for ledger in ledgers:
                ledger.ask_to_trim(name, size, running=True)
    return changed


def trim(
    name: str,
    *,
    to: int = 0,
    now: bool = False,
    wait_seconds: float = 1.0,
    device: str | None = None,
    directory: Path | None = None,
) -> list[Trimmed]:
    """Have an instance give back, once, what it holds idle above a size.

    Parameters
    ----------
    name
        Of the instance.
    to
        Bytes that it may keep.
    now
        Preempt running requests as well, where what is idle is not enough.
    wait_seconds
        How long to look for the effect; what has not gone by then goes later.
    device, directory
        As for `set`.

    Raises
    ------
    NoInstanceError
        No such instance runs.
    """
    with _ledgers_of(name, device, directory) as ledgers:
        before = [_find(ledger.snapshot(), name) for ledger in ledgers]
        asked = [ledger.ask_to_trim(name, to, running=now) for ledger in ledgers]
        deadline = time.monotonic() + wait_seconds
        while True:
            found = [_trimmed(*one) for one in zip(ledgers, before, asked, strict=True)]
            if all(one.done for one in found) or time.monotonic() >= deadline:
                return found
            time.sleep(_LOOK_S)


def evict(name: str, *, device: str | None = None, directory: Path | None = None) -> list[Evicted]:
    """End the records that a dead instance has left, where nobody needed its memory yet.

    What its processes held the system has freed already; the budget regains it with the next
    sample, which whoever needs memory takes.

    Raises
    ------
    NoInstanceError
        No such instance is there.
    LedgerError
        Some process of it lives; the message names it.
    """
    with _ledgers_of(name, device, directory) as ledgers:
        views = [_find(ledger.snapshot(), name) for ledger in ledgers]
        deadline = time.monotonic() + _DYING_S
        for ledger, view in zip(ledgers, views, strict=True):
            _refuse_live(ledger, view)
            while (left := _with_key(ledger.snapshot(), view.key)) is not None:
                ledger.retire_dead()
                if time.monotonic() > deadline:
                    raise LedgerError(
                        f"the owner of {name!r} on {ledger.spec.uuid} is dead, but process "
                        f"{_pids(left)} still holds {format_size(left.charged_bytes)}; end it"
                    )
                time.sleep(_LOOK_S)
        return [
            Evicted(ledger.spec.uuid, name, view.charged_bytes, _all_pids(view))
            for ledger, view in zip(ledgers, views, strict=True)
        ]


def snapshot(directory: Path | None = None) -> list[Snapshot]:
    """Every ledger of a directory at one moment each, without taking a lock.

    Raises
    ------
    LedgerError
        A ledger or the directory cannot be trusted or read, or keeps changing.
    """
    found = []
    for path in Ledger.existing(_directory(directory)):
        with Ledger.read(path) as observer:
            found.append(observer.snapshot())
    return found


def _directory(given: Path | None) -> Path:
    return Settings.from_environ().dir if given is None else given


@contextmanager
def _ledgers_of(name: str, device: str | None, directory: Path | None) -> Iterator[list[Ledger]]:
    """The ledgers in which an instance has a record, by device."""
    where = _directory(directory)
    paths, names = [], []
    for path in Ledger.existing(where):
        with Ledger.read(path) as observer:
            found = observer.snapshot()
        if device in (None, found.spec.uuid):
            there = [i.name for i in found.instances]
            names += there
            paths += [path] * (name in there)
    if not paths:
        on = "" if device is None else f" on {device}"
        there_text = ", ".join(sorted({*names})) or "none at all"
        raise NoInstanceError(f"no instance {name!r} runs{on}; there is {there_text} (in {where})")
    opened: list[Ledger] = []
    try:
        for path in paths:
            opened.append(Ledger.attach(path))
        yield opened
    finally:
        for ledger in opened:
            ledger.close()


def _first(found: Snapshot, true: Callable[[InstanceView], bool]) -> InstanceView | None:
    return next((i for i in found.instances if true(i)), None)


def _with_key(found: Snapshot, key: str) -> InstanceView | None:
    return _first(found, lambda i: i.key == key)


def _find(found: Snapshot, name: str) -> InstanceView:
    view = _first(found, lambda i: i.name == name)
    if view is None:
        raise NoInstanceError(f"the instance {name!r} on {found.spec.uuid} has ended meanwhile")
    return view


def _trimmed(ledger: Ledger, before: InstanceView, to_bytes: int) -> Trimmed:
    """How far a trim has come."""
    # First: where it is over, the figures tell of all that it made go.
    trims = ledger.is_trimming(before.key)
    view = _with_key(ledger.snapshot(), before.key)
    pools = () if view is None else view.pools
    after_bytes = sum(pool.charge_bytes for pool in pools)
    releases = any(pool.figures.releasing_bytes for pool in pools)
    return Trimmed(
        ledger.spec.uuid,
        before.name,
        before.charged_bytes,
        after_bytes,
        to_bytes,
        done=not trims and not releases,
        answered=not trims or releases or after_bytes < before.charged_bytes,
        pids=_all_pids(before),
    )


def _all_pids(view: InstanceView) -> tuple[int, ...]:
    return tuple(sorted({view.pid, *(pool.pid for pool in view.pools)}))


def _pids(view: InstanceView) -> str:
    return " ".join(str(pool.pid) for pool in view.pools if pool.live)


def _refuse_live(ledger: Ledger, view: InstanceView) -> None:
    if view.state is not State.DEAD:
        raise LedgerError(
            f"{view.name!r} on {ledger.spec.uuid} lives in process {view.pid}; end that one, or "
            f"take memory back with: kvtide trim {view.name}, kvtide limit {view.name} SIZE --now"
        )
