"""Draw who held how much of a device over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kvtide.units import MIB
from kvtide.verify.sampling import Sample

__all__ = ["can_draw", "draw_memory"]

_COLOURS = ("#2a78b5", "#e08a2b", "#5b9f5b", "#a05ca0")


def can_draw() -> bool:
    """Whether matplotlib is there: the extra `plot`."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_memory(
    samples: Sequence[Sample],
    names: Sequence[str],
    phases: Sequence[tuple[float, str]],
    path: Path,
) -> None:
    """Write a PNG: the instances' charges stacked, the budget above them, the phases named.

    Parameters
    ----------
    phases
        `(seconds, title)` of each phase's beginning, on the samples' clock.
    """
    import matplotlib as mpl

    mpl.use("agg")  # no display
    import matplotlib.pyplot as plt

    seconds = [s.seconds for s in samples]
    charges = [[s.charged_bytes.get(name, 0) / MIB for s in samples] for name in names]
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    axes.stackplot(seconds, *charges, labels=names, colors=_COLOURS[: len(names)], alpha=0.85)
    budget = [s.budget_bytes / MIB for s in samples]
    axes.plot(seconds, budget, color="black", linewidth=1.5, label="budget")
    top = max(budget, default=0.0)
    for begin, title in phases:
        axes.axvline(begin, color="grey", linewidth=0.6, linestyle=":")
        axes.text(begin, top * 1.03, f" {title}", fontsize=8, rotation=20, va="bottom")
    axes.set(xlabel="seconds", ylabel="MiB", ylim=(0, top * 1.25 or 1), title=None)
    axes.margins(x=0)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
