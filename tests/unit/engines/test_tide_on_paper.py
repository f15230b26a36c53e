"""A vLLM engine's tide over real memory, ledgers and ranks on paper, step by step."""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.pool import Geometry
from kvtide.units import MIB
from ranks_world import GRANULE, Engine, World, layers

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm import tide as tide_module
    from kvtide.engines.vllm.need import Ahead
    from kvtide.engines.vllm.tide import Tide

pytestmark = pytest.mark.torch

WIDE = layers(64, GRANULE, 1)  # a block is a granule
SHARED = layers(64, 2 * MIB, 4)  # several blocks lie in a granule
ASKEW = layers(64, 3 * MIB, 1)  # every other block lies in two


class Watch:
    """Rings when a test lets the time pass."""

    def __init__(self) -> None:
        self.called = False
        self.alarms: list[float] = []

    def search(self, on: bool) -> None:
        """Nobody dies here."""

    def alarm(self, seconds: float) -> None:
        self.alarms.append(seconds)


class Driver:
    """An engine's steps: the tide around a scheduler that a test stands in for."""

    def __init__(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, near: int, far: int
    ) -> None:
        self.engine, self.clock = engine, engine.memory._clock
        monkeypatch.setattr(tide_module, "time", SimpleNamespace(monotonic=self.clock))
        tide: Any = Tide.__new__(Tide)
        self.tide, blocks = tide, engine.blocks
        tide.memory = engine.memory
        tide._pool = SimpleNamespace(
            free=blocks.free, get_num_free_blocks=lambda: blocks.free.count + len(blocks.cached)
        )
        head = SimpleNamespace(request_id="r", num_tokens=1)
        tide._need = SimpleNamespace(
            ahead=lambda: Ahead(near, far),
            blocks=lambda: near,
            heads=lambda: [head],
            least=lambda tokens: near,
        )
        self.running: list[object] = []
        self.requests = True
        tide._scheduler = SimpleNamespace(
            running=self.running, has_unfinished_requests=lambda: self.requests
        )
        tide._manager = SimpleNamespace(watermark_blocks=0)
        tide._watermark = 0.0
        tide._preemption = SimpleNamespace(serve=lambda: False)
        tide._overdue = SimpleNamespace(
            forget=lambda: None, find=lambda heads: {}, left_seconds=1e9
        )
        tide.watch = Watch()
        tide.hopeless, tide.asleep = {}, False
        tide._pressed = tide._wishes_ahead = tide._lingered = tide._refused = False
        tide._shortfall, tide._probe_seconds = 0, 0.25
        tide._owing_at = tide._ahead_at = tide._far_at = tide._missed_at = 0.0
        self._coordinator = SimpleNamespace(get_num_blocks_to_allocate=lambda: near)
        tide._measure_allocations(self._coordinator)

    def step(self, *, asks: bool = True, scheduled: int = 0) -> bool:
        """One step; whether the request's blocks could be had. Time passes to the next alarm."""
        tide, engine = self.tide, self.engine
        tide.begin()
        needed = self._coordinator.get_num_blocks_to_allocate() if asks else 0
        came = asks and tide._pool.get_num_free_blocks() >= needed
        output = SimpleNamespace(total_num_scheduled_tokens=scheduled)
        tide.end(output)
        for rank, link in zip(engine.ranks, engine.links, strict=True):
            if not engine.memory.ranks.direct:
                rank.endpoint.step(vars(output).get("kvtide"), runs=False)
                link.send()
                link.deliver()
        engine.clock.now += 0.001
        return bool(came)

    def sleep(self) -> None:
        """Until the alarm that the last step set."""
        self.engine.clock.now += self.tide.watch.alarms.pop()
        self.tide.watch.called = True


def engine_of(
    tmp_path: Path, geometry: Geometry, *, direct: bool = True, total: int = 64
) -> tuple[World, Engine]:
    world = World(tmp_path, total_bytes=total * GRANULE)
    return world, world.engine([(0, geometry)], direct=direct)


def take(engine: Engine, blocks: int) -> Sequence[int]:
    taken = None
    while taken is None:
        taken = engine.step(blocks)
        engine.quieten()
    return taken


@pytest.mark.parametrize("direct", [True, False], ids=["in this process", "in another one"])
def test_an_engine_whose_blocks_lie_apart_has_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """What it may hold would do for its request, but each granule backs a part of a block only."""
    world, engine = engine_of(tmp_path, ASKEW, direct=direct)
    ledger = world.ledgers["paper-0"]
    taken = take(engine, 30)
    kept = [block for block in taken if block % 4 == 0][:7]
    engine.give([block for block in taken if block not in kept], cache=True)
    engine.quieten()
    ledger.set_limit("engine-0", 16 * GRANULE)
    engine.squeeze()
    engine.give(kept, cache=True)
    engine.quieten()
    engine.squeeze()
    engine.memory.end_wish()
    assert engine.memory.free_count == 7
    needed = 9
    driver = Driver(engine, monkeypatch, needed, needed)
    for _ in range(40):
        if driver.step():
            return
        if driver.tide.asleep:
            driver.sleep()
    pytest.fail(f"{engine.memory.free_count} of {needed} blocks after {engine.clock.now - 1000} s")


def test_an_idle_engine_pays_a_refund_that_found_the_ledger_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = engine_of(tmp_path, WIDE)
    ledger = world.ledgers["paper-0"]
    assert engine.memory.grow_for(40, 40)
    lock = os.open(ledger.path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    engine.memory.trim()
    os.close(lock)
    assert ledger.snapshot().charged_bytes > GRANULE
    driver = Driver(engine, monkeypatch, 0, 0)
    driver.requests = False
    driver.step(asks=False)
    assert ledger.snapshot().charged_bytes == GRANULE


def test_an_engine_that_owes_a_refund_looks_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = engine_of(tmp_path, WIDE)
    ledger = world.ledgers["paper-0"]
    assert engine.memory.grow_for(40, 40)
    driver = Driver(engine, monkeypatch, 0, 0)
    driver.requests = False
    driver.tide.watch.called = True
    lock = os.open(ledger.path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    driver.step(asks=False)
    os.close(lock)
    assert driver.tide.watch.alarms, "nothing would ever make it pay"
    driver.sleep()
    driver.step(asks=False)
    assert ledger.snapshot().charged_bytes == GRANULE


def test_an_idle_engine_that_can_give_nothing_more_looks_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The granule of its null block holds other blocks too, which are free for ever."""
    _, engine = engine_of(tmp_path, SHARED)
    driver = Driver(engine, monkeypatch, 0, 0)
    driver.requests = False
    steps = 1
    driver.step(asks=False)
    while driver.tide.watch.alarms and steps < 10:
        driver.sleep()
        driver.step(asks=False)
        driver.tide.watch.called = False
        steps += 1
    assert engine.blocks.free.count > 0
    assert steps <= 2, "it polls"


def test_an_idle_engine_lets_go_once_more_after_it_has_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = engine_of(tmp_path, WIDE)
    driver = Driver(engine, monkeypatch, 0, 0)
    for _ in range(2):
        assert engine.memory.grow_for(10, 10)
        driver.requests = True
        driver.step(asks=False, scheduled=1)
        driver.requests = False
        driver.step(asks=False)
        driver.sleep()
        driver.step(asks=False)
        driver.tide.watch.called = False
        assert engine.mapped_bytes()[0] == GRANULE


def test_an_engine_that_waited_in_vain_lets_go_when_it_idles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has is too little for a request that is then given up."""
    world, engine = engine_of(tmp_path, WIDE)
    driver = Driver(engine, monkeypatch, 20, 20)
    driver.requests = False
    driver.step(asks=False)
    driver.tide.watch.called = True
    driver.step(asks=False)
    other = world.engine([(0, WIDE)], direct=True)
    assert other.memory.grow_for(50, 50)
    driver.requests = True
    driver.step()
    assert driver.tide.asleep
    assert engine.memory.grow(5)
    driver.requests = False
    driver.tide.watch.called = False
    driver.tide.watch.alarms.clear()
    driver.step(asks=False)
    driver.sleep()
    driver.step(asks=False)
    assert engine.mapped_bytes()[0] == GRANULE


def test_who_missed_nothing_does_not_sleep_for_a_wish_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the queue waits for something else than memory."""
    world, engine = engine_of(tmp_path, WIDE, direct=False)
    other = world.engine([(0, WIDE)], direct=True)
    assert other.memory.grow_for(40, 40)
    other.take(40)
    take(engine, 10)
    engine.give(list(engine.blocks.live), cache=False)
    engine.quieten()
    driver = Driver(engine, monkeypatch, 5, 40)
    driver.step(asks=False)
    assert engine.memory.wishing
    assert not driver.tide.asleep


def test_what_coming_steps_need_is_not_given_back_before_it_is_grown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whose blocks are mostly found in the prefix cache need less than is grown ahead."""
    _, engine = engine_of(tmp_path, layers(512, GRANULE, 1), total=512)
    driver = Driver(engine, monkeypatch, 250, 250)
    driver.running.append(object())
    changes: list[str] = []
    memory = engine.memory
    for name in ("grow", "shrink"):
        original = getattr(memory.changes, name)

        def noted(*args: Any, _name: str = name, _call: Any = original, **kwargs: Any) -> Any:
            changes.append(_name)
            return _call(*args, **kwargs)

        monkeypatch.setattr(memory.changes, name, noted)
    held: list[list[int]] = []
    for _ in range(600):
        driver.step(asks=False, scheduled=1)
        taken = engine.take(5)
        assert taken is not None
        held.append(taken)
        if len(held) > 4:
            engine.give(held.pop(0), cache=False)
        engine.clock.now += 0.02
    assert "shrink" not in changes, changes


def test_nobody_is_preempted_for_what_could_not_go_before_it_ran_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is idle goes first, and takes ranks in other processes a step."""
    world, engine = engine_of(tmp_path, WIDE, direct=False)
    other = world.engine([(0, WIDE)], direct=True)
    taken = take(engine, 60)
    engine.give(taken[50:], cache=True)
    engine.quieten()
    engine.memory.publish()
    world.ledgers["paper-0"].set_terms("engine-1", lambda terms: terms._replace(priority=5))
    assert not other.memory.grow_for(20, 20)
    driver = Driver(engine, monkeypatch, 0, 0)
    driver.running.append(object())
    busy: list[bool] = []

    def serve() -> bool:
        busy.append(engine.memory.changes.busy)
        return False

    driver.tide._preemption = SimpleNamespace(serve=serve)
    driver.tide.watch.called = True
    for _ in range(6):
        driver.step(asks=False, scheduled=1)
    assert busy, "nobody is ever preempted"
    assert not any(busy)
