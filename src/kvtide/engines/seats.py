"""An engine's place on its devices: registered by its outermost process, found by the others."""

from __future__ import annotations

import os
import sys
import threading
import time

from kvtide.device.base import DeviceInfo
from kvtide.device.host import HostDevice
from kvtide.engines.family import at_end, outlive_members
from kvtide.errors import KvtideError
from kvtide.ledger import DeviceSpec, Instance, Ledger
from kvtide.observe.tallies import sweep
from kvtide.observe.tally import tallies_of
from kvtide.ranks.seat import Seat
from kvtide.settings import Settings
from kvtide.units import MIB

__all__ = ["find_seat", "spec_of", "take_seats"]

_VARIABLE = "KVTIDE_INTERNAL_SEATS"
_MIN_MARGIN_BYTES = 512 * MIB
_MARGIN_SHARE = 100
# How long the others may take to end by themselves when the outermost process is at its end, and
# how long a busy ledger is tried then.
_LEAVING_SECONDS = 10.0
_RETIRING_SECONDS = 10.0

# Kept for the life of this process: with them its leases would end.
_taken: list[tuple[Ledger, Instance]] = []
_leaving = threading.Lock()


def spec_of(info: DeviceInfo, settings: Settings) -> DeviceSpec:
    """How a device's ledger describes it, by the settings of whoever creates the file."""
    margin_bytes = settings.margin
    if margin_bytes is None:
        share_bytes = max(info.total_bytes // _MARGIN_SHARE, _MIN_MARGIN_BYTES)
        margin_bytes = 0 if info.backend == "host" else share_bytes
    return DeviceSpec(
        uuid=info.uuid,
        backend=info.backend,
        name=info.name,
        total_bytes=info.total_bytes,
        margin_bytes=margin_bytes,
        budget_cap_bytes=settings.budget,
        granularity_bytes=info.granularity_bytes,
    )


def take_seats(settings: Settings, default_name: str, devices: list[DeviceInfo]) -> str:
    """Register an instance on each of these devices, under one name; the name.

    Its limit, min, priority and headroom are in force from here on. Processes started from now on
    find the seats.

    Raises
    ------
    KvtideError
        A ledger cannot be used, or the name is taken.
    """
    if not _taken:
        at_end(_leave)
    ledgers = [
        Ledger.open(settings.dir, spec_of(info, settings))
        for info in sorted(devices, key=lambda info: info.uuid)
    ]
    name, explicit = settings.name or default_name, settings.name is not None
    seats = []
    for ledger in ledgers:
        instance = ledger.register(
            name,
            explicit=explicit,
            limit_bytes=settings.limit,
            min_bytes=settings.min,
            priority=settings.priority,
            headroom_bytes=settings.headroom,
        )
        # The first device decides which name is free; the others must have the same one.
        name, explicit = instance.name, True
        _taken.append((ledger, instance))
        seats.append(f"{ledger.path.name}={instance.key}")
    os.environ[_VARIABLE] = ",".join(seats)
    return name


def _leave() -> None:
    # Who takes the server down may come while it ends by itself: it lives till all is done.
    with _leaving:
        # A dying worker holds its lease until its memory is torn down, which no clock knows.
        outlive_members(_LEAVING_SECONDS)
        deadline = time.monotonic() + _RETIRING_SECONDS
        while _taken:
            _give_up(*_taken.pop(), deadline)


def _give_up(ledger: Ledger, instance: Instance, deadline: float) -> None:
    try:
        instance.close()
        # Who sees the last pool end removes what else is left; a busy ledger is tried again.
        while ledger.retire_dead() or _is_there(ledger, instance):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        _measure(ledger)
        # And what its processes counted, where they were ended by force.
        sweep(tallies_of(ledger.path), ledger.snapshot())
    except KvtideError as error:
        print(f"kvtide: {error}", file=sys.stderr, flush=True)
    ledger.close()


def _measure(ledger: Ledger) -> None:
    """What workers held that have closed nothing fell with the budget, and is free by now.

    A GPU can be measured by who has a context there: the next one that lacks memory does.
    """
    spec = ledger.spec
    if spec.backend == "host":
        device = HostDevice(spec.total_bytes, uuid=spec.uuid)
        try:
            ledger.sample(device.free_bytes)
        finally:
            device.close()


def _is_there(ledger: Ledger, instance: Instance) -> bool:
    return any(i.key == instance.key for i in ledger.snapshot().instances)


def find_seat(settings: Settings, info: DeviceInfo) -> Seat:
    """The instance that this server's outermost process registered on a device.

    Raises
    ------
    KvtideError
        It registered none there, or is gone.
    """
    ledger = Ledger.open(settings.dir, spec_of(info, settings))
    seats = dict(s.split("=") for s in os.environ.get(_VARIABLE, "").split(",") if s)
    key = seats.get(ledger.path.name)
    if key is None:
        raise KvtideError(
            f"this server did not register on device {info.uuid} before its workers started; it "
            f"did on {', '.join(seats) or 'none'}"
        )
    return Seat(ledger, ledger.instance(key))
