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
# Beside the KV cache; on the host device that does not count.
_BESIDE: Final = (("non_kv", "%"), ("loading", "+"))
_OUTSIDE, _FREE, _LIMIT, _MIN, _WAITS = "#", "·", "|", ":", "!"
_LEGEND = "█ in use ▓ cached ░ idle % beside + loading # others | limit : min ! waits"
_HUES: Final = ("blue", "yellow", "green", "magenta", "cyan", "red")
_STATE_STYLES: Final = {"waiting": "bold red", "dead": "bold red", "running": "green"}
_NAME_WIDTH, _STATE_WIDTH, _SIZE_WIDTH = 18, 9, 9
_ROWS_OF_EVENTS = 4
_KEYS = "↑↓ choose s sort l limit m min p priority h headroom t trim q quit"


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
        f"{format_size(device.free_bytes)} free, {format_size(device.lendable_bytes)} lendable"
    )
    instances = ordered(device.instances, chosen.sort)
    hues = {
        instance.key: _HUES[number % len(_HUES)]
        for number, instance in enumerate(sorted(device.instances, key=lambda i: i.name))
    }
    rows = [
        line
        for i in instances
        for line in (_row(device, i, hues[i.key], chosen, width), _more(i))
        if line is not None
    ]
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
        for use, mark in _uses(device)
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


def _uses(device: DeviceStatus) -> tuple[tuple[str, str], ...]:
    return _USES if device.backend == "host" else (*_USES, *_BESIDE)


def _own_width(width: int) -> int:
    return max(8, width - _NAME_WIDTH - 2 - _STATE_WIDTH - 4 * _SIZE_WIDTH)


def _columns(width: int) -> str:
    own = "holds".ljust(_own_width(width))
    return f"  {'instance':{_NAME_WIDTH}}{'state':{_STATE_WIDTH}}{own}" + "".join(
        title.rjust(_SIZE_WIDTH) for title in ("in use", "cached", "mapped", "limit")
    )


def _row(
    device: DeviceStatus, instance: InstanceStatus, hue: str, chosen: Chosen, width: int
) -> Text:
    here = chosen.key == (device.device, instance.key)
    name = instance.name
    if len(name) > _NAME_WIDTH - 1:
        # The end tells alike names apart.
        name = f"{name[: _NAME_WIDTH // 2]}…{name[-(_NAME_WIDTH // 2 - 2) :]}"
    row = Text("> " if here else "  ", style="bold")
    row.append(f"{name:{_NAME_WIDTH}}", style="reverse" if here else "bold")
    row.append(f"{instance.state:{_STATE_WIDTH}}", style=_STATE_STYLES.get(instance.state, ""))
    row.append(_own_bar(device, instance, hue, _own_width(width)))
    limit = "none" if instance.limit_bytes is None else format_size(instance.limit_bytes)
    for size in (instance.used_bytes, instance.cached_bytes, instance.mapped_bytes):
        row.append(format_size(size).rjust(_SIZE_WIDTH))
    row.append(limit.rjust(_SIZE_WIDTH))
    return row


def _more(instance: InstanceStatus) -> Text | None:
    """A second line, where there is more to say."""
    said = []
    if instance.waiting_bytes:
        said.append(f"waits for {format_size(instance.waiting_bytes)}")
    if instance.silent:
        said.append("does not answer calls to give back")
    if instance.min_bytes:
        unbacked_bytes = instance.min_bytes - instance.backed_min_bytes
        unbacked = f" ({format_size(unbacked_bytes)} unbacked)" if unbacked_bytes > 0 else ""
        said.append(f"min {format_size(instance.min_bytes)}{unbacked}")
    if instance.priority:
        said.append(f"priority {instance.priority}")
    if instance.headroom_bytes:
        said.append(f"headroom {format_size(instance.headroom_bytes)}")
    if instance.non_kv_bytes:
        said.append(f"{format_size(instance.non_kv_bytes)} beside the cache")
    if instance.loading_bytes:
        said.append(f"{format_size(instance.loading_bytes)} to be loaded")
    if instance.quarantined_bytes:
        said.append(f"{format_size(instance.quarantined_bytes)} lost to the device")
    return Text(f"    {', '.join(said)}", style="dim") if said else None


def _own_bar(device: DeviceStatus, instance: InstanceStatus, hue: str, room: int) -> Text:
    """Of one instance, on the scale of its device: what it holds, waits for, limit and min."""
    marks, sum_bytes = [_FREE] * room, 0
    for use, mark in (*_uses(device), ("waiting", _WAITS)):
        before = round(room * sum_bytes / device.total_bytes)
        sum_bytes += getattr(instance, f"{use}_bytes")
        for at in range(before, min(room, round(room * sum_bytes / device.total_bytes))):
            marks[at] = mark
    for size_bytes, mark in ((instance.min_bytes or None, _MIN), (instance.limit_bytes, _LIMIT)):
        if size_bytes is not None:
            at = round(room * size_bytes / device.total_bytes)
            marks[max(0, min(room - 1, at))] = mark
    return Text("".join(marks), style=hue)


def _events(events: Sequence[Event], width: int) -> list[Text]:
    lines = [Text(f"─ {_LEGEND} ".ljust(width, "─"), style="dim")]
    for event in events[-_ROWS_OF_EVENTS:]:
        when = time.strftime("%H:%M:%S", time.localtime(event.time))
        lines.append(Text(f"{when} {event.instance} {event.text}"))
    return lines + [Text()] * (_ROWS_OF_EVENTS + 1 - len(lines))


def _last_line(chosen: Chosen) -> Text:
    if chosen.asking is not None:
        return Text(f"{chosen.asking}: {chosen.typed}▏ (Enter sets, Esc leaves)", style="bold")
    if chosen.said:
        return Text(f"{chosen.said}  ({_KEYS})")
    return Text(_KEYS, style="dim")
