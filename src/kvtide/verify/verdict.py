"""What the demo measured, what must hold of it, and how that is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvtide.units import format_size
from kvtide.verify.client import Completion
from kvtide.verify.sampling import Sample, peak

__all__ = ["Check", "Figures", "Outcome", "figures_of", "judge"]


class Figures(msgspec.Struct, frozen=True):
    """What `demo.json` says. Sizes in bytes, `idle_charged_bytes` with empty prefix caches."""

    tokens_equal: bool
    requests: int
    requests_failed: int
    budget_bytes: int
    peak_charged_bytes: int
    idle_charged_bytes: int
    a_peak_bytes: int
    b_peak_bytes: int
    preemptions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that the demo saw.

    Attributes
    ----------
    native, elastic
        The same requests in the same order, answered by vLLM alone and under kvtide.
    samples
        Of the whole elastic part, in order.
    moved_from_seconds, moved_to_seconds
        When b grew into what a had cached.
    idle_charged_bytes
        At the end, nothing running and the prefix caches empty.
    idle_allowed_bytes
        The most that this may be.
    ended_by_force
        Processes that did not end when they were asked to.
    """

    native: Sequence[Completion]
    elastic: Sequence[Completion]
    samples: Sequence[Sample]
    moved_from_seconds: float
    moved_to_seconds: float
    idle_charged_bytes: int
    idle_allowed_bytes: int
    preemptions: int
    ended_by_force: Sequence[int]
    seconds: float


class Check(NamedTuple):
    """One thing that must hold, and what was found."""

    title: str
    held: bool
    found: str


def figures_of(outcome: Outcome) -> Figures:
    """The figures of a run."""
    samples = outcome.samples
    return Figures(
        tokens_equal=_equal(outcome) == len(outcome.native) > 0,
        requests=len(outcome.elastic),
        requests_failed=sum(c.error is not None for c in outcome.elastic),
        budget_bytes=max((s.budget_bytes for s in samples), default=0),
        peak_charged_bytes=peak(samples),
        idle_charged_bytes=outcome.idle_charged_bytes,
        a_peak_bytes=peak(samples, "a"),
        b_peak_bytes=peak(samples, "b"),
        preemptions=outcome.preemptions,
        seconds=round(outcome.seconds, 1),
    )


def judge(outcome: Outcome) -> list[Check]:
    """What must hold of a run."""
    f = figures_of(outcome)
    samples = outcome.samples
    over = sum(map(_is_over, [*samples[:1], *samples[:-1]], samples))
    kernel = [(s.kernel_bytes, s.ceiling_bytes) for s in samples if s.kernel_bytes is not None]
    kernel_over = sum(size_bytes > ceiling_bytes for size_bytes, ceiling_bytes in kernel)
    kernel_peak = max((size_bytes for size_bytes, _ in kernel), default=0)
    native_failed = sum(c.error is not None for c in outcome.native)
    return [
        Check(
            "every request was answered",
            f.requests > 0 and f.requests_failed == native_failed == 0,
            f"{f.requests - f.requests_failed} of {f.requests}",
        ),
        Check(
            "the tokens are native vLLM's",
            f.tokens_equal,
            f"{_equal(outcome)} of {len(outcome.native)} equal",
        ),
        Check(
            "charges never exceeded the budget",
            bool(samples) and over == 0,
            f"peak {format_size(f.peak_charged_bytes)} of {format_size(f.budget_bytes)}, "
            f"{over} of {len(samples)} samples above",
        ),
        Check(
            "nor did the memory that the kernel counts",
            bool(kernel) and kernel_over == 0,
            f"peak {format_size(kernel_peak)}, {kernel_over} of {len(kernel)} samples above",
        ),
        Check(
            "the two needed more than there is",
            f.a_peak_bytes + f.b_peak_bytes > f.budget_bytes,
            f"peaks {format_size(f.a_peak_bytes)} and {format_size(f.b_peak_bytes)}",
        ),
        _memory_moved(outcome),
        Check(
            "idle, almost nothing is held",
            0 < outcome.idle_allowed_bytes >= outcome.idle_charged_bytes,
            f"{format_size(f.idle_charged_bytes)} of at most "
            f"{format_size(outcome.idle_allowed_bytes)}",
        ),
        Check(
            "all processes ended when asked",
            not outcome.ended_by_force,
            "none by force" if not outcome.ended_by_force else f"{len(outcome.ended_by_force)} not",
        ),
    ]


def _is_over(before: Sample, sample: Sample) -> bool:
    """Whether more is charged than the device lends, or was granted than the budget had."""
    charged_bytes = sample.total_charged_bytes
    granted = charged_bytes > before.total_charged_bytes
    if granted and sample.budget_bytes >= before.budget_bytes:
        return charged_bytes > sample.budget_bytes
    return charged_bytes > sample.ceiling_bytes


def _equal(outcome: Outcome) -> int:
    pairs = zip(outcome.native, outcome.elastic, strict=True)
    return sum(a.error is None and b.error is None and a.tokens == b.tokens for a, b in pairs)


def _memory_moved(outcome: Outcome) -> Check:
    begin, end = outcome.moved_from_seconds, outcome.moved_to_seconds
    during = [s for s in outcome.samples if begin <= s.seconds <= end]
    title = "b grew into what a had cached"
    if not during:
        return Check(title, False, "no sample was taken")
    a_before = during[0].charged_bytes.get("a", 0)
    a_least = min(s.charged_bytes.get("a", 0) for s in during)
    b_peak = peak(during, "b")
    room_bytes = during[0].budget_bytes - a_before
    return Check(
        title,
        a_least < a_before and b_peak > room_bytes,
        f"a from {format_size(a_before)} to {format_size(a_least)}, "
        f"b to {format_size(b_peak)} where {format_size(room_bytes)} were free",
    )
