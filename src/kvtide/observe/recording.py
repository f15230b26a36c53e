"""A recording of devices as a trace that Perfetto and Chrome open: memory over time, and events.

The file is a JSON array of trace events, one a line, so that a recording that was cut short is
still one: viewers and `read_recording` take it without its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from kvtide import __version__
from kvtide.errors import UsageError
from kvtide.observe.snapshot import DeviceStatus, InstanceStatus
from kvtide.observe.watcher import Event, Sample

__all__ = ["Moment", "Recorder", "Recording", "read_recording"]

_USES = ("used", "cached", "idle", "quarantined")
_MEMORY, _DEVICE, _BEGIN = "memory in bytes", "device in bytes", "kvtide recording"


class Recorder:
    """Writes samples as trace events.

    Parameters
    ----------
    file
        Open for writing text.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._begun: float | None = None
        self._last = 0.0
        self._processes: dict[tuple[str, str], int] = {}
        self._before: dict[int, dict[str, int]] = {}
        self.events = 0
        self.samples = 0

    def add(self, sample: Sample) -> None:
        """Write a sample and its events."""
        if self._begun is None:
            self._begun = min([sample.time, *(_start(event) for event in sample.events)])
            self._file.write("[\n")
            data = {"version": __version__, "unix_time": self._begun}
            self._write(_BEGIN, "M", 0, data, ts=0, separated=False)
        for event in sample.events:
            self._event(event)
        for device in sample.status.devices:
            self._device(sample.time, device)
        self.samples += 1
        self._last = sample.time
        self._file.flush()

    def end(self) -> None:
        """Write the end, with the last figures once more, so that curves reach it."""
        if self._begun is not None:
            ts = self._ts(self._last)
            for process, figures in self._before.items():
                self._write(_name_of(figures), "C", process, figures, ts=ts)
            self._file.write("\n]\n")
        self._file.flush()

    def _device(self, time: float, device: DeviceStatus) -> None:
        figures = {
            "outside": device.outside_bytes,
            "budget": device.budget_bytes,
            "total": device.total_bytes,
        }
        self._figures(time, self._process(device.device, ""), figures)
        here = set()
        for instance in device.instances:
            process = self._process(device.device, instance.name)
            here.add(process)
            self._figures(time, process, _figures(instance))
        for (of, name), process in self._processes.items():
            if of == device.device and name and process not in here:
                self._figures(time, process, dict.fromkeys(_USES, 0))

    def _figures(self, time: float, process: int, figures: dict[str, int]) -> None:
        """Only what has changed; the step before it once more, since viewers draw steps."""
        if self._before.get(process) != figures:
            self._before[process] = figures
            self._write(_name_of(figures), "C", process, figures, ts=self._ts(time))

    def _event(self, event: Event) -> None:
        process = self._process(event.device, event.instance)
        shown = {"cause": event.cause, "bytes": event.bytes, "text": event.text}
        begun = self._ts(_start(event))
        if event.kind == "resume":
            took = {"dur": event.detail / 1e3}
            self._write("wait", "X", process, shown, ts=begun, category=event.kind, more=took)
        else:
            scope = {"s": "p"}
            self._write(event.kind, "i", process, shown, ts=begun, category=event.kind, more=scope)
        self.events += 1

    def _process(self, device: str, instance: str) -> int:
        key = (device, instance)
        if key not in self._processes:
            number = len(self._processes) + 1
            self._processes[key] = number
            name = f"{instance} on {device}" if instance else device
            data = {"name": name, "device": device, "instance": instance}
            self._write("process_name", "M", number, data, ts=0)
        return self._processes[key]

    def _ts(self, time: float) -> float:
        assert self._begun is not None
        return round(max(0.0, time - self._begun) * 1e6, 1)

    def _write(
        self,
        name: str,
        phase: str,
        process: int,
        shown: dict[str, Any],
        *,
        ts: float,
        category: str = "memory",
        more: dict[str, Any] | None = None,
        separated: bool = True,
    ) -> None:
        line = {"name": name, "cat": category, "ph": phase, "ts": ts, "pid": process, "tid": 0}
        line |= {"args": shown} | (more or {})
        self._file.write((",\n" if separated else "") + json.dumps(line))


def _start(event: Event) -> float:
    return event.time - (event.detail / 1e9 if event.kind == "resume" else 0.0)


def _figures(instance: InstanceStatus) -> dict[str, int]:
    if instance.state == "dead":
        return dict.fromkeys(_USES, 0)
    return {use: getattr(instance, f"{use}_bytes") for use in _USES}


def _name_of(figures: dict[str, int]) -> str:
    return _DEVICE if "total" in figures else _MEMORY


class Moment(NamedTuple):
    """Figures from a time on, in seconds since the recording began."""

    time: float
    figures: dict[str, int]


class Recording(NamedTuple):
    """What a file says. `memory` and `events` are by device and instance; events: time, text."""

    unix_time: float
    seconds: float
    devices: dict[str, list[Moment]]
    memory: dict[tuple[str, str], list[Moment]]
    events: dict[tuple[str, str], list[tuple[float, str, str]]]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text in ("[", "]", ""):
                continue
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return  # cut short here


def read_recording(path: Path) -> Recording:
    """Read what `kvtide record` wrote, also one that was cut short.

    Raises
    ------
    UsageError
        It is something else.
    """
    try:
        lines = list(_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not lines or not isinstance(lines[0], dict) or lines[0].get("name") != _BEGIN:
        raise UsageError(f"{path} is no recording: kvtide record -o FILE makes one")
    found = Recording(lines[0]["args"]["unix_time"], 0.0, {}, {}, {})
    names: dict[int, tuple[str, str]] = {}
    end = 0.0
    for line in lines[1:]:
        time = line["ts"] / 1e6
        end = max(end, time)
        if line["name"] == "process_name":
            names[line["pid"]] = (line["args"]["device"], line["args"]["instance"])
            continue
        of = names[line["pid"]]
        if line["ph"] == "C" and line["name"] == _DEVICE:
            found.devices.setdefault(of[0], []).append(Moment(time, line["args"]))
        elif line["ph"] == "C":
            found.memory.setdefault(of, []).append(Moment(time, line["args"]))
        else:
            shown = (time, line["name"], line["args"]["text"])
            found.events.setdefault(of, []).append(shown)
    return found._replace(seconds=end)
