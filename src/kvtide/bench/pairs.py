"""Figures of paired runs: what holds on a noisy machine is one against the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["paired_ratios"]


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """One against the other, pair by pair: the ratios' median, least and most."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return {
        "median": round(statistics.median(ratios), 4),
        "min": round(ratios[0], 4),
        "max": round(ratios[-1], 4),
    }
