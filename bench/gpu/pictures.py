"""Pictures of what the scripts here measured: SVGs on white, for light and for dark pages.

    python bench/gpu/pictures.py bench/results/h200 docs/images

Draws those whose results are there: memory over time and times to the first token of
`instances.json`, memory of `late_start.json`, the ratios of `serving*.json`, times to
the first token of `open_loop.json`. Needs matplotlib, which `pip install '.[plot]'` brings, and no
GPU. Some seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from serving import BAR

INK = "#24292f"
COLOURS = {
    "native": "#8a8f98",
    "second native": "#b9bdc4",
    "kvtide": "#2a8fd0",
    "kvcached": "#e08a2b",
    "kvcached, bounded": "#b3541e",
}
LABELS = {
    "native": "fixed split",
    "kvtide": "kvtide",
    "kvcached": "kvcached, without a bound",
    "kvcached, bounded": "kvcached, the same memory",
}
ENGINE_COLOURS = {"a": "#2a8fd0", "b": "#e08a2b", "c": "#4fa36b"}
GIB_MIB = 1024
CURVE_POINTS = 200

mpl.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "kvtide",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "figure.titlesize": 11,
        "legend.frameon": False,
        **dict.fromkeys(
            (
                "text.color",
                "axes.labelcolor",
                "axes.edgecolor",
                "xtick.color",
                "ytick.color",
                "axes.titlecolor",
            ),
            INK,
        ),
    }
)


def write(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title)
    figure.savefig(path, metadata={"Date": None, "Title": title})
    plt.close(figure)
    print(path, flush=True)


def memory(axes: Any, track: Sequence[Any], began: float, ended: float) -> float:
    """Charges of each instance over time, stacked, and the budget; the top in GiB."""
    looked = [(at - began, held, budget) for at, held, budget in track if began - 1 <= at <= ended]
    # Steps change where a sample differs from the one before.
    shown = [s for n, s in enumerate(looked) if n == 0 or s[1:] != looked[n - 1][1:]]
    shown.append((looked[-1][0], *shown[-1][1:]))
    seconds = [at for at, _, _ in shown]
    names = sorted({name for _, held, _ in shown for name in held})
    charges = [[held.get(name, 0) / GIB_MIB for _, held, _ in shown] for name in names]
    budget = [b / GIB_MIB for _, _, b in shown]
    axes.stackplot(
        seconds,
        *charges,
        labels=[f"engine {name}" for name in names],
        colors=[ENGINE_COLOURS.get(name, "#a05ca0") for name in names],
        step="post",
        linewidth=0,
        alpha=0.85,
    )
    axes.step(seconds, budget, where="post", color=INK, linewidth=1.2, label="budget")
    axes.set_xlabel("seconds")
    axes.set_ylabel("KV cache, GiB")
    axes.margins(x=0)
    return max(budget, default=1.0)


def instances_memory(results: dict[str, Any], path: Path) -> None:
    parts = {
        number: systems["kvtide"]
        for number, systems in results["engines"].items()
        if "memory" in systems.get("kvtide", {})
    }
    figure, grid = plt.subplots(
        len(parts), 1, figsize=(9, 2.6 * len(parts) + 0.6), layout="constrained", squeeze=False
    )
    for axes, (number, result) in zip(grid[:, 0], parts.items(), strict=True):
        bursts = result["bursts"]
        began = bursts[0]["began"]
        top = memory(axes, result["memory"]["track"], began, bursts[-1]["ended"] + 1)
        for burst in bursts:
            at = burst["began"] - began
            axes.axvline(at, color=INK, linewidth=0.6, linestyle=":")
            axes.text(at, top * 1.03, f" burst in {burst['name']}", fontsize=8)
        axes.set_ylim(0, top * 1.12)
        axes.set_title(f"{number} engines", loc="left")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    write(figure, path, "KV memory of engines on one GPU as each has a burst in turn, under kvtide")


def curve(axes: Any, values: Sequence[float], colour: str, label: str) -> None:
    """The share of requests whose first token came by then."""
    ordered = sorted(values)
    places = sorted({round(n * (len(ordered) - 1) / CURVE_POINTS) for n in range(CURVE_POINTS + 1)})
    shares = [100 * (n + 1) / len(ordered) for n in places]
    ordered = [ordered[n] for n in places]
    axes.step([0, *ordered], [0, *shares], where="post", color=colour, label=label, linewidth=1.8)


def instances_ttft(results: dict[str, Any], path: Path) -> None:
    parts = results["engines"]
    figure, grid = plt.subplots(
        1, len(parts), figsize=(4.4 * len(parts) + 0.6, 3.4), layout="constrained", squeeze=False
    )
    for axes, (number, systems) in zip(grid[0], parts.items(), strict=True):
        for name, result in systems.items():
            if "bursts" not in result:
                continue
            values = [t / 1e3 for burst in result["bursts"][1:] for t in burst["ttft_ms"]]
            curve(axes, values, COLOURS[name], LABELS[name])
        axes.set_title(f"{number} engines", loc="left")
        axes.set_xlabel("seconds to the first token")
        axes.set_ylabel("requests, %")
        axes.set_xlim(left=0)
        axes.legend(loc="lower right")
    requests = results["requests"]
    write(figure, path, f"Time to the first token, bursts of {requests} requests in turn")


def late_start(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    track = results["memory"]["track"]
    began = next((at for at, held, _ in track if sum(held.values()) > 0), track[0][0])
    top = memory(axes, track, began, track[-1][0])
    for at, what in ((results["b_began"], " b starts"), (results["b_ready"], " b is up")):
        axes.axvline(at - began, color=INK, linewidth=0.8, linestyle=":")
        axes.text(at - began, top * 1.03, what, fontsize=8)
    axes.set_ylim(0, top * 1.12)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    write(figure, path, "Engine b starts while engine a is at full load of the device")


def serving(results: dict[str, Any], path: Path) -> None:
    rates = results["tokens_per_s"]
    phases = list(rates["native"])
    figure, axes = plt.subplots(figsize=(7, 0.7 * len(phases) + 1.6), layout="constrained")
    for name in ("kvtide", "kvcached"):
        for row, phase in enumerate(phases):
            mine = rates.get(name, {}).get(phase, [])
            ratios = sorted(m / n for m, n in zip(mine, rates["native"][phase], strict=False))
            if not ratios:
                continue
            place = row + (0.12 if name == "kvcached" else -0.12)
            label = f"{name}, each round" if row == 0 else None
            colour = COLOURS[name]
            axes.plot(ratios, [place] * len(ratios), "o", color=colour, alpha=0.55, label=label)
            axes.plot(ratios[len(ratios) // 2], place, "|", color=colour, markersize=18)
    axes.axvline(1.0, color=INK, linewidth=1)
    axes.axvline(BAR, color=INK, linewidth=0.8, linestyle=":", label=f"bar, {BAR}")
    axes.set_yticks(range(len(phases)), phases)
    axes.set_ylim(len(phases) - 0.5, -0.5)
    axes.set_xlabel("tokens a second, to native's of the same round")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    write(figure, path, "Serving the 8B shape: throughput against native vLLM")


def open_loop(results: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for name, told in results["open_loop"].items():
        label = "native" if name == "native" else name
        curve(axes, told["ttft_each_ms"], COLOURS[name], label)
    axes.set_xlabel("milliseconds to the first token")
    axes.set_ylabel("requests, %")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")
    title = f"Open loop, {results['rate']:.0f} requests a second: 80% of native's saturation"
    write(figure, path, title)


PICTURES: list[tuple[str, str, Callable[[dict[str, Any], Path], None]]] = [
    ("instances", "instances-memory", instances_memory),
    ("instances", "instances-ttft", instances_ttft),
    ("late_start", "late-start", late_start),
    ("serving", "serving", serving),
    ("serving-one-gpu", "serving-one-gpu", serving),
    ("open_loop", "open-loop", open_loop),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="directory of the JSON files")
    parser.add_argument("out", type=Path, help="directory for the pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = 0
    for results, picture, draw in PICTURES:
        path = options.results / f"{results}.json"
        if path.exists():
            draw(json.loads(path.read_text()), options.out / f"{picture}.svg")
            drawn += 1
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
