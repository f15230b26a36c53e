"""A recording as a picture: who held how much of each device over time, and what happened."""

from __future__ import annotations

import html
import io
import time
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.errors import KvtideError, UnsupportedError, UsageError
from kvtide.observe.recording import Moment, Recording
from kvtide.units import MIB, format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "draw"]

FORMATS = (".html", ".png", ".svg")
_SHADES = {"used": 1.0, "cached": 0.55, "idle": 0.25}
_MARKED = {"wait": "^", "miss": "v", "vanish": "x", "quarantine": "x", "limit": "|", "preempt": "<"}
_STEPS = 2000


def draw(recording: Recording, path: Path) -> None:
    """Draw it into a file, of the kind that its name says.

    Raises
    ------
    UsageError
        The name says no kind that there is, or nothing was recorded.
    UnsupportedError
        matplotlib is not installed.
    KvtideError
        The file cannot be written.
    """
    kind = path.suffix.lower()
    if kind not in FORMATS:
        raise UsageError(f"{path.name!r} must end in one of {', '.join(FORMATS)}")
    if not recording.devices:
        raise UsageError("no device was seen in this recording")
    try:
        figure = _figure(recording)
    except ImportError:
        raise UnsupportedError("pictures need matplotlib: pip install 'kvtide[plot]'") from None
    try:
        if kind != ".html":
            figure.savefig(path, dpi=120)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        svg = drawn.getvalue()
        path.write_text(_page(recording, svg[svg.index("<svg") :]), encoding="utf-8")
    except OSError as error:
        raise KvtideError(f"{path} cannot be written: {error.strerror}") from error


def _figure(recording: Recording) -> Figure:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = len(recording.devices)
    # Text stays text in SVG, so that it can be read out and searched.
    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 1 + 4 * count), layout="constrained")
        plots = figure.subplots(count, 1, squeeze=False)
        for (plot,), device in zip(plots, sorted(recording.devices), strict=True):
            _plot(plot, recording, device)
    return figure


def _plot(plot: Any, recording: Recording, device: str) -> None:
    # What is remembered from before the first look has no figures.
    begin = recording.devices[device][0].time
    end = max(recording.seconds, begin + 1e-3)
    times = [begin + (end - begin) * i / _STEPS for i in range(_STEPS + 1)]
    total_bytes = recording.devices[device][-1].figures["total"]
    below = [0.0] * len(times)
    for number, of in enumerate(sorted(key for key in recording.memory if key[0] == device)):
        color = f"C{number % 10}"
        for use, shade in _SHADES.items():
            mib = _at(recording.memory[of], use, times)
            above = [b + m for b, m in zip(below, mib, strict=True)]
            label = f"{of[1]} {use}" if any(mib) else None
            plot.fill_between(
                times, below, above, color=color, alpha=shade, label=label, linewidth=0, step="post"
            )
            below = above
        for at, kind, _ in recording.events.get(of, ()):
            if kind in _MARKED and at >= begin:
                height = below[min(_STEPS, round(_STEPS * (at - begin) / (end - begin)))]
                plot.plot([at], [height], _MARKED[kind], color=color, markeredgecolor="black")
    outside = _at(recording.devices[device], "outside", times)
    if any(outside):
        top = total_bytes / MIB
        lower = [top - mib for mib in outside]
        plot.fill_between(
            times, lower, [top] * len(times), color="0.6", label="others", linewidth=0, step="post"
        )
    plot.set_ylim(0, total_bytes / MIB)
    plot.set_xlim(begin, end)
    plot.set_title(f"{device}, {format_size(total_bytes)}")
    plot.set_ylabel("MiB")
    plot.set_xlabel("seconds")
    plot.legend(loc="upper left", fontsize="small", ncols=3)


def _at(moments: list[Moment], figure: str, times: list[float]) -> list[float]:
    """A figure at each of these times, in MiB; 0 before the first."""
    begins = [moment.time for moment in moments]
    values = [moment.figures[figure] / MIB for moment in moments]
    return [values[i - 1] if (i := bisect_right(begins, at)) else 0.0 for at in times]


def _page(recording: Recording, svg: str) -> str:
    rows = sorted(
        (at, device, instance, text)
        for (device, instance), events in recording.events.items()
        for at, _, text in events
    )
    cells = "\n".join(
        f"<tr><td>{at:.3f}</td>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in (device, instance, text))
        + "</tr>"
        for at, device, instance, text in rows
    )
    begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(recording.unix_time))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Memory over time</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 70rem; }}
figure {{ margin: 0; background: white; }} svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: .15rem .8rem; }}
</style></head><body>
<h1>Memory over time</h1>
<p>Recorded from {begun}, for {recording.seconds:.1f} seconds; {len(rows)} events.</p>
<figure aria-label="Memory held over time; the events are listed below">{svg}</figure>
<h2>Events</h2>
<table><thead><tr><th scope="col">second</th><th scope="col">device</th>
<th scope="col">instance</th><th scope="col">event</th></tr></thead>
<tbody>
{cells}
</tbody></table>
</body></html>
"""
