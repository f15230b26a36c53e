"""Memory that a starting engine is about to take beside its KV cache: announced, counted down.

A worker reserves before it loads, tells what it has loaded, and turns the rest into what it has
measured once it is warm. What a start measured is kept beside the ledger for the next one of the
same model and flags. On the host device weights do not count, so nothing is reserved there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtide.errors import NeverFitsError
from kvtide.ledger import State
from kvtide.ledger.directory import file_mode
from kvtide.ledger.explaining import explain
from kvtide.ranks.seat import Seat
from kvtide.units import format_size, parse_size

__all__ = ["Reservation", "StartCosts", "recalled", "remember", "reserve_for_tests"]

_log = logging.getLogger("vllm.kvtide")

_PROBE_SECONDS: Final = 0.25
_TEST_VARIABLE: Final = "KVTIDE_INTERNAL_RESERVE"


class Reservation:
    """What one worker will hold of its device beside its KV cache.

    Parameters
    ----------
    seat
        Its engine's place on the device.
    sampler
        Free bytes of the device, as its driver or kernel counts them; needs a context.
    """

    def __init__(self, seat: Seat, sampler: Callable[[], int]) -> None:
        self._seat = seat
        self._sampler = sampler
        self._told_bytes = 0
        self.size_bytes = 0

    def make(self, size_bytes: int, wait_seconds: float | None) -> None:
        """Reserve, and wait until others have made room for it.

        Raises
        ------
        NeverFitsError
            The device is too small, or others kept the room for longer than may be waited.
        """
        seat, ledger, instance = self._seat, self._seat.ledger, self._seat.instance
        most_bytes = ledger.spec.total_bytes - ledger.spec.margin_bytes
        if size_bytes > most_bytes:
            raise NeverFitsError(
                f"{instance.name} is about to load {format_size(size_bytes)}, and "
                f"{ledger.spec.uuid} less its margin is {format_size(most_bytes)}: use a smaller "
                "model, quantization, or more devices"
            )
        waker, started = instance.waker(), time.monotonic()
        try:
            ledger.sample(self._sampler)
            instance.reserve(size_bytes)
            self.size_bytes = size_bytes
            while instance.room_bytes < 0:
                waited = time.monotonic() - started
                if wait_seconds is not None and waited > wait_seconds:
                    instance.measured(0, "")
                    raise NeverFitsError(
                        f"no room for what is about to be loaded after {waited:.0f} s "
                        f"(KVTIDE_WAIT_DEADLINE): "
                        f"{explain(ledger.snapshot(), instance.name, size_bytes)}"
                    )
                instance.set_state(State.WAITING)
                instance.call_holders()
                waker.wait(_PROBE_SECONDS)
                ledger.retire_dead()
                ledger.sample(self._sampler)
        finally:
            waker.close()
        seat.instance.set_state(State.STARTING)
        _log.info("kvtide: %s reserved for what is about to be loaded", format_size(size_bytes))

    def loaded(self, total_bytes: int) -> None:
        """So much is loaded by now in all; after it has been taken. More than reserved is fine."""
        more_bytes = min(total_bytes, self.size_bytes) - self._told_bytes
        if more_bytes > 0:
            self._told_bytes += more_bytes
            self._seat.instance.loaded(more_bytes)

    def finish(self, measured_bytes: int, source: str) -> None:
        """All is loaded and warm: what is held beside the KV cache, measured by `source`.

        Whatever was reserved beyond it is to be had from here on.
        """
        self._seat.instance.measured(measured_bytes, source)
        self._seat.ledger.sample(self._sampler)


class StartCosts:
    """What one worker takes beside its KV cache while it starts, announced from start to end.

    Parameters
    ----------
    seat
        Its engine's place on the device.
    sampler
        Free bytes of the device.
    own_bytes
        What this process holds of the device now, beside its KV cache.
    directory, key
        Where the figures of earlier starts are kept, and under what; see `recalled`.
    """

    def __init__(
        self,
        seat: Seat,
        sampler: Callable[[], int],
        own_bytes: Callable[[], int],
        directory: Path,
        key: str,
    ) -> None:
        self._reservation = Reservation(seat, sampler)
        self._own_bytes = own_bytes
        self._at_first_bytes = own_bytes()
        self._directory, self._key = directory, key

    def reserve(self, planned_bytes: int, wait_seconds: float | None) -> None:
        """Reserve what the last such start came to, or else what is planned; wait for room.

        Parameters
        ----------
        planned_bytes
            What is known without an earlier start: the weights. 0 reserves nothing.
        wait_seconds
            How long others may keep the room.

        Raises
        ------
        NeverFitsError
            See `Reservation.make`.
        """
        kept_bytes = recalled(self._directory, self._key)
        size_bytes = planned_bytes if kept_bytes is None else kept_bytes - self._at_first_bytes
        if size_bytes > 0:
            self._reservation.make(size_bytes, wait_seconds)

    def loaded(self) -> None:
        """Something more has been loaded: what is held by now is no longer to come."""
        self._reservation.loaded(self._own_bytes() - self._at_first_bytes)

    def finish(self, own_bytes: int, source: str) -> None:
        """All is loaded and warm, and this is held in the end, as `source` tells."""
        self._reservation.finish(own_bytes, source)
        remember(self._directory, self._key, own_bytes)


def _file(directory: Path, key: str) -> Path:
    return directory / f"start-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def recalled(directory: Path, key: str) -> int | None:
    """What the last start under this key measured, in bytes; None if there was none to be read.

    The key names everything that the size depends on: model, revision, data types, parallel sizes,
    the engine and its version, and the flags of its graphs.
    """
    path = _file(directory, key)
    try:
        kept = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        _log.warning(
            "kvtide: what the last such start measured is not known, and this one reserves its "
            "weights alone: %s cannot be read (%s); remove it, and it is made anew (KVTIDE_DIR)",
            path,
            error.strerror,
        )
        return None
    good = isinstance(kept, dict) and kept.get("key") == key and isinstance(kept.get("bytes"), int)
    return int(kept["bytes"]) if good else None


def remember(directory: Path, key: str, size_bytes: int) -> None:
    """Keep what a start measured, for the next one under the same key; a hint, so it may fail."""
    path = _file(directory, key)
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        try:
            _write(fresh, json.dumps({"key": key, "bytes": size_bytes}).encode())
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        _log.warning(
            "kvtide: what this start measured is not kept, and the next one reserves what is known "
            "without it: %s cannot be written (%s); make room in KVTIDE_DIR, or let it be written",
            path,
            error.strerror,
        )


def _write(path: Path, text: bytes) -> None:
    """Make a file for whom the ledgers of its directory are for, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:  # noqa: PTH123
        os.fchmod(fd, file_mode(path.parent.stat()))
        file.write(text)


def reserve_for_tests(seat: Seat, sampler: Callable[[], int], wait_seconds: float | None) -> None:
    """On a device where nothing is loaded: reserve what a variable says, hold it, let go of it.

    `KVTIDE_INTERNAL_RESERVE=32MiB,2` reserves 32 MiB and "loads" for 2 s.
    """
    text = os.environ.get(_TEST_VARIABLE)
    if text is None:
        return
    size, _, seconds = text.partition(",")
    reservation = Reservation(seat, sampler)
    reservation.make(parse_size(size), wait_seconds)
    time.sleep(float(seconds or 0))
    reservation.loaded(parse_size(size))
    reservation.finish(0, "given")
