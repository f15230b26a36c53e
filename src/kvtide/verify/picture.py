"""Draw who held how much of a device over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from kvtide.units import MIB
from kvtide.verify.sampling import Sample

__all__ = ["can_draw", "draw_memory"]

_LEAD_SECONDS = 2.0  # before the first phase
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

    shown = [s for s in samples if s.seconds >= phases[0][0] - _LEAD_SECONDS] if phases else samples
    seconds = [s.seconds for s in shown]
    charges = [[s.charged_bytes.get(name, 0) / MIB for s in shown] for name in names]
    budget = [s.budget_bytes / MIB for s in shown]
    top = max(budget, default=0.0) or 1.0
    figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
    colours = _COLOURS[: len(names)]
    axes.stackplot(seconds, *charges, labels=names, colors=colours, step="post", linewidth=0)
    axes.step(seconds, budget, where="post", color="black", linewidth=1.5, label="budget")
    for number, (begin, _) in enumerate(phases, 1):
        axes.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
        axes.text(begin, top * 1.04, f" {number}", color="dimgrey", weight="bold")
    titles = "    ".join(f"{number}  {title}" for number, (_, title) in enumerate(phases, 1))
    axes.set_xlabel(f"seconds\n{titles}", fontsize=9)
    axes.set_ylabel("MiB charged")
    axes.set_ylim(0, top * 1.15)
    axes.margins(x=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
