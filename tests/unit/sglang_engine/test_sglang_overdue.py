"""Requests of SGLang that wait in vain: how long, and what is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtide.engines.sglang.overdue import Overdue


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def overdue(deadline: float | None, limit_bytes: int | None = None) -> tuple[Overdue, Clock]:
    clock = Clock()
    seat: Any = SimpleNamespace(instance=SimpleNamespace(name="a", limit_bytes=limit_bytes))
    return Overdue(seat, deadline, clock=clock), clock


def test_without_a_deadline_it_waits_for_ever() -> None:
    late, clock = overdue(None)
    assert not late.is_late(SimpleNamespace(rid="x"))
    clock.now += 1e9
    assert not late.is_late(SimpleNamespace(rid="x"))


def test_each_head_of_the_queue_has_its_own_time() -> None:
    late, clock = overdue(5.0)
    first, second = SimpleNamespace(rid="x"), SimpleNamespace(rid="y")
    assert not late.is_late(first)
    clock.now += 4
    assert not late.is_late(first)
    assert not late.is_late(second)
    clock.now += 4
    assert not late.is_late(second)
    clock.now += 1
    assert late.is_late(second)


def test_what_could_be_raised_is_named() -> None:
    assert "the device allows 7" in overdue(None)[0].why_never(8, 7)
    assert "the limit of a allows 7" in overdue(None, 1)[0].why_never(8, 7)
