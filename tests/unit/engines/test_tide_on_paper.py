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

from kvtide.ledger import layout
from kvtide.pool import Geometry
from kvtide.units import MIB
from ranks_world import GRANULE, Engine, World, layers

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm import foresight as foresight_module
    from kvtide.engines.vllm import tide as tide_module
    from kvtide.engines.vllm.foresight import Foresight
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


class BlockPool:
    """Counts as vLLM's pool does once it is adopted."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self.free = blocks.free
        self.spares_cache = False

    @property
    def cached_count(self) -> int:
        return len(self._blocks.cached)

    def get_num_free_blocks(self) -> int:
        return int(self.free.count) + (0 if self.spares_cache else self.cached_count)


class Driver:
    """An engine's steps: the tide around a scheduler that a test stands in for."""

    def __init__(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, near: int, far: int
    ) -> None:
        self.engine, self.clock = engine, engine.memory._clock
        for module in (tide_module, foresight_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock))
        tide: Any = Tide.__new__(Tide)
        self.tide, blocks = tide, engine.blocks
        tide.memory = engine.memory
        tide._pool = BlockPool(blocks)
        head = SimpleNamespace(request_id="r", num_tokens=1)
        tide._need = SimpleNamespace(
            ahead=lambda: Ahead(near, far),
            most=lambda: None,
            blocks=lambda: near,
            heads=lambda: [head],
            least=lambda tokens: near,
            batch_blocks=0,
            several_wait=lambda: False,
        )
        self.running: list[object] = []
        self.requests = True
        tide._scheduler = SimpleNamespace(
            running=self.running, has_unfinished_requests=lambda: self.requests
        )
        tide._manager = SimpleNamespace(watermark_blocks=0)
        tide._foresight = Foresight(tide._scheduler, engine.memory, blocks.free, tide._need, 0.0)
        tide._preemption = SimpleNamespace(serve=lambda: False)
        tide._overdue = SimpleNamespace(
            forget=lambda: None, find=lambda heads: {}, left_seconds=1e9
        )
        tide.watch = Watch()
        tide.hopeless, tide.asleep = {}, False
        tide._pressed = tide._lingered = tide._refused = False
        tide._shortfall, tide._probe_seconds = 0, 0.25
        tide._owing_at = tide._missed_at = 0.0
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


def changes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the changes that an engine begins from now on."""
    changes: list[str] = []
    for name in ("grow", "shrink"):
        original = getattr(engine.memory.changes, name)

        def noted(*args: Any, _name: str = name, _call: Any = original, **kwargs: Any) -> Any:
            changes.append(_name)
            return _call(*args, **kwargs)

        monkeypatch.setattr(engine.memory.changes, name, noted)
    return changes


def take(engine: Engine, blocks: int) -> Sequence[int]:
    taken = None
    while taken is None:
        taken = engine.step(blocks)
        engine.quieten()
    return taken


def engine_whose_blocks_lie_apart(tmp_path: Path, *, direct: bool) -> tuple[World, Engine, int]:
    """And a number of blocks for which what it may hold would do, if they lay together."""
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
    return world, engine, 9


@pytest.mark.parametrize("direct", [True, False], ids=["in this process", "in another one"])
def test_an_engine_whose_blocks_lie_apart_has_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Each granule backs a part of a block only."""
    _, engine, needed = engine_whose_blocks_lie_apart(tmp_path, direct=direct)
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
    changes = changes_of(engine, monkeypatch)
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


def test_a_prefix_cache_is_kept_where_nothing_lies_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is set aside for one who has waited longer."""
    world, engine = engine_of(tmp_path, WIDE)
    engine.give(take(engine, 20), cache=True)
    other = world.engine([(0, WIDE)], direct=True)
    seat, waits = (e.memory.seats["paper-0"].instance for e in (engine, other))
    waits.wish(seat.room_bytes)
    words, at = world.ledgers["paper-0"].file.words, layout.instance_at(waits.slot)
    words[at + layout.I_WISH_SINCE_NS] -= 5_000_000_000
    driver = Driver(engine, monkeypatch, 30, 30)
    for _ in range(3):
        assert not driver.step()
        assert driver.tide.asleep
        driver.sleep()
    assert len(engine.blocks.cached) == 20


def test_a_prefix_cache_is_kept_where_the_ledger_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = engine_of(tmp_path, WIDE)
    engine.give(take(engine, 20), cache=True)
    driver = Driver(engine, monkeypatch, 30, 30)
    lock = os.open(world.ledgers["paper-0"].path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not driver.step()
    os.close(lock)
    assert len(engine.blocks.cached) == 20
    driver.sleep()
    assert driver.step()


def test_who_regroups_does_not_sleep_before_it_has_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, needed = engine_whose_blocks_lie_apart(tmp_path, direct=True)
    driver = Driver(engine, monkeypatch, needed, needed)
    assert not driver.step()
    assert not driver.tide.asleep
    assert driver.step()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.6, 0.9])
def test_a_watermark_takes_what_it_takes_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    _, engine = engine_of(tmp_path, layers(2048, GRANULE, 1), total=2100)
    driver = Driver(engine, monkeypatch, 4, 8)
    driver.tide._foresight.watermark = share
    take(engine, 4)
    driver.running.append(object())
    for _ in range(100):
        driver.step(asks=False, scheduled=1)
    usable = engine.pool.usable_count
    free = engine.blocks.free.count
    assert free - 8 >= int(share * usable)
    assert usable <= (4 + 8 + 1) / (1 - share) + 10, "what was grown ahead, and more"


def test_a_last_change_that_is_confirmed_between_steps_has_a_step_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A growth for a request that was aborted: an idle engine would keep it for ever."""
    _, engine = engine_of(tmp_path, WIDE, direct=False)
    driver = Driver(engine, monkeypatch, 0, 0)
    assert engine.memory.grow_for(20, 20)
    driver.requests = False
    driver.step(asks=False)
    assert not driver.tide.watch.alarms
    assert driver.tide.wants_step()
    driver.step(asks=False)
    driver.sleep()
    for _ in range(3):
        driver.step(asks=False)
    assert engine.mapped_bytes()[0] == GRANULE


def test_what_is_under_way_is_not_wished_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = engine_of(tmp_path, WIDE, direct=False)
    other = world.engine([(0, WIDE)], direct=True)
    assert other.memory.grow_for(36, 36)
    room = engine.memory.seats["paper-0"].instance.room_bytes // GRANULE
    driver = Driver(engine, monkeypatch, room - 4, room + 2)
    driver.step(asks=False)
    wished = engine.memory.seats["paper-0"].instance.wish_bytes // GRANULE
    ahead = engine.memory.ahead_blocks
    assert 0 < wished <= max(6, ahead)


def test_what_came_while_memory_is_under_way_is_ordered_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive one after the other: each would wait for the memory of the one before,
    and then for its own."""
    _, engine = engine_of(tmp_path, layers(512, GRANULE, 1), direct=False, total=512)
    driver = Driver(engine, monkeypatch, 100, 100)
    memory, tide = engine.memory, driver.tide
    tide.begin()
    assert memory.coming_count >= 100
    asked = memory.pool.mapped_bytes
    tide.begin()
    assert memory.pool.mapped_bytes == asked, "what is under way already is asked for again"
    tide._need.ahead = lambda: Ahead(200, 200)
    tide.begin()
    assert memory.coming_count >= 200
    driver.step(asks=False)
    driver.step(asks=False)
    assert engine.blocks.free.count >= 200
    assert memory.coming_count == 0


def test_who_owes_others_lets_what_is_under_way_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is given while memory is coming: with one growth after the other nothing ever is."""
    _, engine = engine_of(tmp_path, layers(512, GRANULE, 1), direct=False, total=512)
    driver = Driver(engine, monkeypatch, 100, 100)
    driver.tide.begin()
    asked = engine.memory.pool.mapped_bytes
    driver.tide._need.ahead = lambda: Ahead(200, 200)
    driver.tide.watch.called = True
    driver.tide.begin()
    assert engine.memory.pool.mapped_bytes == asked


def test_requests_that_come_do_not_ask_again_for_what_was_refused_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They free nothing; an engine whose cache fills its budget gets dozens of them a second."""
    _, engine = engine_of(tmp_path, layers(512, GRANULE, 1))
    take(engine, 40)
    engine.give(list(engine.blocks.live), cache=True)
    driver = Driver(engine, monkeypatch, 45, 60)
    driver.running.append(object())
    asked: list[object] = []
    grant = engine.memory.ranks.grant
    monkeypatch.setattr(
        engine.memory.ranks, "grant", lambda size: asked.append(size) or grant(size)
    )
    driver.step(asks=False)
    refused = len(asked)
    assert refused
    for _ in range(20):
        driver.tide.wake()
        driver.step(asks=False)
    assert len(asked) == refused
    driver.tide.came_free()
    driver.step(asks=False)
    assert len(asked) > refused


@pytest.mark.parametrize(
    ("several", "direct", "spare"),
    [(True, False, 100), (False, False, 0), (True, True, 0)],
    ids=["one after the other", "a single one", "where memory comes at once"],
)
def test_where_requests_come_one_after_the_other_a_steps_worth_is_there_before_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool, direct: bool, spare: int
) -> None:
    """What other processes map is a step late: those that come meanwhile would wait for theirs."""
    _, engine = engine_of(tmp_path, layers(2048, GRANULE, 1), direct=direct, total=2048)
    driver = Driver(engine, monkeypatch, 10, 10)
    need = driver.tide._need
    need.batch_blocks, need.several_wait = 100, lambda: several
    driver.tide.begin()
    # With what is known to be needed: a begin later others would have come already.
    assert engine.memory.coming_count + engine.blocks.free.count - 10 >= spare
    for _ in range(4):
        driver.step(asks=False)
    ahead = engine.memory.ahead_blocks
    assert spare <= engine.blocks.free.count - 10 <= spare + ahead
    driver.requests = False
    need.several_wait, need.ahead = (lambda: False), (lambda: Ahead(0, 0))
    driver.step(asks=False)
    driver.sleep()
    for _ in range(3):
        driver.step(asks=False)
    assert engine.mapped_bytes()[0] == GRANULE


def test_what_nobody_needs_yet_is_an_eighth_of_what_is_free_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = engine_of(tmp_path, layers(2048, GRANULE, 1), direct=False, total=400)
    other = world.engine([(0, layers(2048, GRANULE, 1))], direct=True)
    driver = Driver(engine, monkeypatch, 10, 10)
    driver.tide._need.batch_blocks = 1000
    driver.tide._need.several_wait = lambda: True
    driver.step(asks=False)
    free = engine.memory.seats["paper-0"].instance.room_bytes // GRANULE
    for _ in range(20):
        driver.step(asks=False)
    assert free / 16 < engine.blocks.free.count - 10 < free / 2
    assert other.memory.grow_for(free // 2, free // 2), "it was taken from who needs it"
    assert not engine.memory.wishing


def test_what_is_there_for_those_who_come_is_not_given_back_to_be_grown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several wait for something else than memory, for many seconds."""
    _, engine = engine_of(tmp_path, layers(2048, GRANULE, 1), direct=False, total=2048)
    driver = Driver(engine, monkeypatch, 10, 10)
    driver.tide._need.batch_blocks, driver.tide._need.several_wait = 100, lambda: True
    driver.running.append(object())
    changes = changes_of(engine, monkeypatch)
    for _ in range(600):
        driver.step(asks=False, scheduled=1)
        engine.clock.now += 0.02
    assert "shrink" not in changes, changes
    driver.tide._need.several_wait = lambda: False
    for _ in range(600):
        driver.step(asks=False, scheduled=1)
        engine.clock.now += 0.02
    assert changes.count("shrink") == 1, "what nobody comes for is kept"


def test_who_comes_while_memory_does_takes_nothing_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes map it a step later: until then a first request waits, and beside others
    that run, which may evict, vLLM leaves free what is cached."""
    _, engine = engine_of(tmp_path, WIDE, direct=False)
    engine.blocks.cached = list(take(engine, 4))
    # All that is free and half of what is cached would do.
    needed = engine.blocks.free.count + 2
    driver = Driver(engine, monkeypatch, near=needed, far=needed)
    pool, manager = driver.tide._pool, driver.tide._manager
    assert not driver.step(), "a cached block was handed out though memory was coming"
    assert manager.watermark_blocks == 4
    assert driver.step(scheduled=1)
    assert not pool.spares_cache
    assert manager.watermark_blocks == 0
    assert pool.cached_count == 4

    driver.running.append(object())
    more = engine.blocks.free.count + 1
    driver.tide._need.ahead = lambda: Ahead(more, more)
    driver.step(asks=False, scheduled=1)
    assert not pool.spares_cache, "who runs would be preempted"
    assert manager.watermark_blocks == 4
