"""One frame of `kvtide top` as text: a pure function of a sample and of what the user chose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from kvtide.observe.snapshot import DeviceStatus, InstanceStatus
from kvtide.observe.watcher import Event, Sample
from kvtide.top.state import SORTS, Chosen, ordered
from kvtide.units import format_size

__all__ = ["frame"]

# How each use of memory is drawn; without colours too they differ.
_USES: Final = (("used", "█"), ("cached", "▓"), ("idle", "░"), ("quarantined", "x"))
_OUTSIDE, _FREE, _LIMIT, _WAITS = "#", "·", "|", "!"
_HUES: Final = ("blue", "yellow", "green", "magenta", "cyan", "red")
_STATE_STYLES: Final = {"waiting": "bold red", "dead": "bold red", "running": "green"}
_NAME_WIDTH = 20
_ROWS_OF_EVENTS = 4
_KEYS = "↑↓ choose  s sort  l limit  t trim  q quit"


def frame(sample: Sample, events: Sequence[Event], chosen: Chosen, width: int, height: int) -> Text:
    """A frame of exactly `height` lines, none longer than `width`."""
    above: list[Text] = [_title(sample, chosen, width)]
    for device in sample.status.devices:
        above += _device(device, chosen, width)
    if not sample.status.devices:
        above.append(Text("no engine has run under kvtide yet", style="dim"))
    above += [Text(f"! {trouble}", style="red") for trouble in sample.troubles]
    below = [*_events(events, width), _last_line(chosen)]
    room = height - len(below)
    if len(above) > room:
        hidden = len(above) - room + 1
        above = [*above[: room - 1], Text(f"... {hidden} more lines: a higher window shows them")]
    above += [Text()] * (room - len(above))
    lines = [*above, *below]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def _title(sample: Sample, chosen: Chosen, width: int) -> Text:
    left = f"kvtide top  sorted by {SORTS[chosen.sort]}"
    right = time.strftime("%H:%M:%S", time.localtime(sample.time))
    return Text(left + right.rjust(max(1, width - len(left))), style="bold")


def _device(device: DeviceStatus, chosen: Chosen, width: int) -> list[Text]:
    heading = (
        f"{device.name or device.device} {format_size(device.total_bytes)}: "
        f"{format_size(device.charged_bytes)} charged of {format_size(device.budget_bytes)}, "
        f"{format_size(device.free_bytes)} free"
    )
    instances = ordered(device.instances, chosen.sort)
    hues = {
        instance.key: _HUES[number % len(_HUES)]
        for number, instance in enumerate(sorted(device.instances, key=lambda i: i.name))
    }
    rows = [_row(device, i, hues[i.key], chosen, width) for i in instances]
    return [
        Text(heading, style="bold"),
        _bar(device, instances, hues, width),
        Text(_columns(width), style="dim"),
        *rows,
        Text(),
    ]


def _bar(
    device: DeviceStatus, instances: Sequence[InstanceStatus], hues: dict[str, str], width: int
) -> Text:
    """All of a device's memory, the parts rounded so that together they are right."""
    parts = [
        (getattr(instance, f"{use}_bytes"), mark, hues[instance.key])
        for instance in instances
        if instance.state != "dead"
        for use, mark in _USES
    ]
    parts.append((device.outside_bytes, _OUTSIDE, "white"))
    bar, sum_bytes, drawn = Text("["), 0, 0
    room = width - 2
    for size_bytes, mark, hue in parts:
        sum_bytes += size_bytes
        upto = min(room, round(room * sum_bytes / device.total_bytes))
        bar.append(mark * (upto - drawn), style=hue)
        drawn = max(drawn, upto)
    bar.append(_FREE * (room - drawn), style="dim")
    bar.append("]")
    return bar


def _own_width(width: int) -> int:
    return max(8, width - _NAME_WIDTH - 2 - 9 - 4 * 10 - 1)


def _columns(width: int) -> str:
    own = "holds".ljust(_own_width(width))
    return f"  {'instance':{_NAME_WIDTH}}{'state':9}{own} " + "".join(
        title.rjust(10) for title in ("in use", "cached", "mapped", "limit")
    )


def _row(
    device: DeviceStatus, instance: InstanceStatus, hue: str, chosen: Chosen, width: int
) -> Text:
    here = chosen.key == (device.device, instance.key)
    name = instance.name
    if len(name) > _NAME_WIDTH - 1:
        name = name[: _NAME_WIDTH - 2] + "…"
    row = Text("> " if here else "  ", style="bold")
    row.append(f"{name:{_NAME_WIDTH}}", style="reverse" if here else "bold")
    row.append(f"{instance.state:9}", style=_STATE_STYLES.get(instance.state, ""))
    row.append(_own_bar(device, instance, hue, _own_width(width)))
    row.append(" ")
    limit = "none" if instance.limit_bytes is None else format_size(instance.limit_bytes)
    for size in (instance.used_bytes, instance.cached_bytes, instance.mapped_bytes):
        row.append(format_size(size).rjust(10))
    row.append(limit.rjust(10))
    if instance.waiting_bytes:
        row.append(f" waits for {format_size(instance.waiting_bytes)}", style="bold red")
    return row


def _own_bar(device: DeviceStatus, instance: InstanceStatus, hue: str, room: int) -> Text:
    """Of one instance, on the scale of its device: what it holds, waits for, and its limit."""
    marks, sum_bytes = [_FREE] * room, 0
    for use, mark in (*_USES, ("waiting", _WAITS)):
        before = round(room * sum_bytes / device.total_bytes)
        sum_bytes += getattr(instance, f"{use}_bytes")
        for at in range(before, min(room, round(room * sum_bytes / device.total_bytes))):
            marks[at] = mark
    if instance.limit_bytes is not None:
        at = round(room * instance.limit_bytes / device.total_bytes)
        marks[max(0, min(room - 1, at))] = _LIMIT
    return Text("".join(marks), style=hue)


def _events(events: Sequence[Event], width: int) -> list[Text]:
    lines = [Text("─" * width, style="dim")]
    for event in events[-_ROWS_OF_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(event.time))
        lines.append(Text(f"{when} {event.instance} {event.text}"))
    return lines + [Text()] * (_ROWS_OF_EVENTS + 1 - len(lines))


def _last_line(chosen: Chosen) -> Text:
    if chosen.asking is not None:
        return Text(f"{chosen.asking}: {chosen.typed}▏ (Enter sets, Esc leaves)", style="bold")
    if chosen.said:
        return Text(f"{chosen.said}  ({_KEYS})")
    legend = "█ in use ▓ cached ░ idle # others · free"
    return Text(f"{_KEYS}   {legend}", style="dim")
