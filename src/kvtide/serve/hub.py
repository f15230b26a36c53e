"""Looks at the devices once an interval, keeps the last minutes, and tells all who listen."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvtide.errors import LedgerError
from kvtide.ledger import Ledger
from kvtide.observe.snapshot import DeviceStatus, Status
from kvtide.observe.watcher import Event, Sample, Watcher

__all__ = ["Hub", "Point", "View", "retire_dead"]

_log = logging.getLogger(__name__)
_KEPT_SECONDS = 900
_KEPT_EVENTS = 500
_SENT_EVENTS = 100


class Point(msgspec.Struct, frozen=True):
    """What an instance held at a time, of one device, for a picture of the last minutes."""

    time: float
    device: str
    outside_bytes: int
    mapped_bytes: dict[str, int]


class View(msgspec.Struct, frozen=True):
    """How things are: every device, the last events, and ledgers that could not be read."""

    time: float
    devices: tuple[DeviceStatus, ...]
    events: tuple[Event, ...]
    troubles: tuple[str, ...]


def retire_dead(directory: Path, device: DeviceStatus) -> None:
    """End the records of the dead, as any engine would that needs memory."""
    for path in Ledger.existing(directory):
        if path.stem == device.device:
            ledger = Ledger.attach(path)
            try:
                ledger.retire_dead()
            finally:
                ledger.close()


class Hub:
    """One watcher for all clients.

    Parameters
    ----------
    directory
        Of the ledgers.
    interval
        Seconds between two looks.
    """

    def __init__(
        self,
        directory: Path,
        interval: float,
        retire: Callable[[Path, DeviceStatus], None] = retire_dead,
    ) -> None:
        self._directory = directory
        self._watcher = Watcher(directory)
        self._interval = interval
        self._retire = retire
        self.points: deque[Point] = deque()
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._dead: set[tuple[str, str]] = set()
        self.sample = Sample(0.0, Status(()), (), (), ())
        # None ends a stream.
        self._listeners: set[asyncio.Queue[bytes | None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look from here on, until the end."""
        await self.look()
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """Look now, and tell."""
        try:
            sample = await asyncio.to_thread(self._look)
        except LedgerError as error:
            sample = msgspec.structs.replace(self.sample, troubles=(str(error),), events=())
        self.sample = sample
        self.events += sample.events
        for device in sample.status.devices:
            mapped = {i.name: i.mapped_bytes for i in device.instances if i.state != "dead"}
            self.points.append(Point(sample.time, device.device, device.outside_bytes, mapped))
        while self.points and self.points[0].time < sample.time - _KEPT_SECONDS:
            self.points.popleft()
        message = b"data: " + msgspec.json.encode(self.view(sample.events)) + b"\n\n"
        self._tell(message)

    def stop(self) -> None:
        """End all streams, since the server ends."""
        self._tell(None)

    def _tell(self, message: bytes | None) -> None:
        for queue in self._listeners:
            if queue.full():  # a client that does not read misses the oldest, and nobody waits
                queue.get_nowait()
            queue.put_nowait(message)

    def _look(self) -> Sample:
        sample = self._watcher.look()
        dead = {
            (device.device, instance.key)
            for device in sample.status.devices
            for instance in device.instances
            if instance.state == "dead"
        }
        # Seen dead twice: nobody who needs memory has come by to retire it.
        for device in sample.status.devices:
            if any(uuid == device.device for uuid, _ in dead & self._dead):
                try:
                    self._retire(self._directory, device)
                except LedgerError as error:
                    _log.warning("kvtide: the dead of %s stay: %s", device.device, error)
        self._dead = dead
        return sample

    def view(self, events: tuple[Event, ...] | None = None) -> View:
        """How things are, with these events or the last ones."""
        shown = tuple(self.events)[-_SENT_EVENTS:] if events is None else events
        sample = self.sample
        return View(sample.time, sample.status.devices, shown, sample.troubles)

    async def stream(self, most: int | None) -> AsyncIterator[bytes]:
        """Server-sent events: one view now, and one after every look; `most` of them."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)
        self._listeners.add(queue)
        sent = 1
        try:
            yield b"data: " + msgspec.json.encode(self.view()) + b"\n\n"
            while (most is None or sent < most) and (message := await queue.get()) is not None:
                yield message
                sent += 1
        finally:
            self._listeners.discard(queue)
