"""The demo's verdict: each thing that must hold fails by itself when it does not."""

from dataclasses import replace

import msgspec
import pytest

from kvtide.units import MIB
from kvtide.verify.client import Completion
from kvtide.verify.sampling import Sample
from kvtide.verify.verdict import Outcome, figures_of, judge


def _done(index, tokens=(1, 2, 3), error=None):
    return Completion(index, tokens, error, 0.0, 1.0)


def _sample(seconds, a, b, *, budget=100, kernel=None):
    kernel_bytes = (a + b if kernel is None else kernel) * MIB
    charged = {"a": a * MIB, "b": b * MIB}
    return Sample(seconds, budget * MIB, charged, kernel_bytes, 100 * MIB)


GOOD = Outcome(
    native=[_done(0), _done(1)],
    elastic=[_done(0), _done(1)],
    samples=[_sample(0, 80, 4), _sample(1, 70, 10), _sample(2, 20, 80), _sample(3, 4, 4)],
    moved_from_seconds=1,
    moved_to_seconds=2,
    idle_charged_bytes=8 * MIB,
    idle_allowed_bytes=32 * MIB,
    preemptions=3,
    ended_by_force=[],
    seconds=12.34,
)


def _failed(outcome):
    return {check.title for check in judge(outcome) if not check.held}


def test_a_good_run_holds():
    assert _failed(GOOD) == set()


def test_a_budget_that_falls_below_the_charges_during_a_release_is_no_grant():
    falling = [_sample(4, 60, 40), _sample(5, 60, 40, budget=90), _sample(6, 50, 40)]
    assert _failed(replace(GOOD, samples=[*GOOD.samples, *falling])) == set()


def test_a_grant_above_the_published_budget_is_seen_though_the_device_lends_more():
    granted = [_sample(4, 60, 20, budget=90), _sample(5, 60, 35, budget=90)]
    assert any("charges never" in t for t in _failed(replace(GOOD, samples=granted + GOOD.samples)))


def test_the_figures():
    assert msgspec.to_builtins(figures_of(GOOD)) == {
        "tokens_equal": True,
        "requests": 2,
        "requests_failed": 0,
        "budget_bytes": 100 * MIB,
        "peak_charged_bytes": 100 * MIB,
        "idle_charged_bytes": 8 * MIB,
        "a_peak_bytes": 80 * MIB,
        "b_peak_bytes": 80 * MIB,
        "preemptions": 3,
        "seconds": 12.3,
    }


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"elastic": [_done(0), _done(1, (1, 2, 4))]}, "the tokens are native vLLM's"),
        ({"samples": [*GOOD.samples, _sample(4, 60, 41, kernel=0)]}, "charges never exceeded"),
        ({"samples": [*GOOD.samples, _sample(4, 0, 0, kernel=101)]}, "nor did the memory"),
        ({"samples": [s for s in GOOD.samples if s.seconds != 2]}, "the two needed more"),
        ({"moved_to_seconds": 1.5}, "b grew into"),
        ({"idle_charged_bytes": 33 * MIB}, "idle, almost nothing"),
        ({"ended_by_force": [77]}, "all processes ended"),
    ],
)
def test_each_check_fails_where_it_should(change, title):
    failed = _failed(replace(GOOD, **change))
    assert any(t.startswith(title) for t in failed), failed


def test_a_failed_request_fails_answers_and_tokens():
    failed = _failed(replace(GOOD, elastic=[_done(0), _done(1, (), "refused")]))
    assert failed == {"every request was answered", "the tokens are native vLLM's"}


def test_nothing_measured_is_not_good():
    nothing = replace(GOOD, native=[], elastic=[], samples=[])
    assert len(_failed(nothing)) >= 5
