"""What vLLM's scheduler misses, of an engine whose only rank is in its own process."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm.foresight import Foresight
    from kvtide.engines.vllm.need import Ahead
    from kvtide.engines.vllm.tide import Tide

pytestmark = pytest.mark.torch


class Memory:
    """Refuses more than it `has`, and notes what was asked for."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(direct=True, message=lambda: None)
        self.has = 0
        self.grown: list[int] = []
        self.asked: list[tuple[int, int]] = []
        self.wished_ahead: list[tuple[int, int]] = []
        self.free_count = self.coming_count = 0
        self.wishing = self.pending = False

    def grow_for(self, blocks: int, desired: int) -> bool:
        self.asked.append((blocks, desired))
        return False

    def grow(self, blocks: int) -> bool:
        self.grown.append(blocks)
        return blocks <= self.has

    def wish_ahead(self, blocks: int, least_blocks: int) -> None:
        self.wished_ahead.append((blocks, least_blocks))
        self.wishing = True

    def end_wish(self) -> None:
        self.wishing = False

    def show(self, state: object) -> None:
        """Nobody looks."""


def tide_that_needs(near: int, far: int, *, free: int, cached: int = 0) -> Any:
    """One whose requests run and miss nothing in this step; what it grows comes at once."""
    tide: Any = Tide.__new__(Tide)
    tide.memory = Memory()
    tide.memory.free_count = free + cached
    tide._pool = SimpleNamespace(free=SimpleNamespace(count=free))
    tide._need = SimpleNamespace(ahead=lambda: Ahead(near, far), several_wait=lambda: False)
    tide._overdue = SimpleNamespace(forget=lambda: None)
    tide._scheduler = SimpleNamespace(running=[object()], has_unfinished_requests=lambda: True)
    tide.watch = SimpleNamespace(search=lambda wishing: None)
    tide._shortfall, tide._missed_at = 0, 0.0
    tide._foresight = Foresight(tide._scheduler, tide.memory, tide._pool.free, tide._need, 0.0)
    return tide


def test_what_coming_steps_lack_is_wished_for_before_a_request_has_to_be_preempted() -> None:
    tide = tide_that_needs(20, 50, free=3, cached=5)
    tide._foresight.grow()
    tide.end(SimpleNamespace(total_num_scheduled_tokens=1))
    assert tide.memory.wished_ahead == [(42, 12)]
    assert tide.memory.wishing, "a step that missed nothing ended a wish for the next ones"

    tide.came_free()
    tide.memory.has = 50
    tide._foresight.grow()
    tide.end(SimpleNamespace(total_num_scheduled_tokens=1))
    assert not tide.memory.wishing, "it has come, and is still wished for"


def test_a_cache_of_its_own_goes_before_that_of_others() -> None:
    tide = tide_that_needs(20, 20, free=3, cached=17)
    tide._foresight.grow()
    tide.end(SimpleNamespace(total_num_scheduled_tokens=1))
    assert tide.memory.wished_ahead == []
    assert not tide.memory.wishing


def test_what_suffices_whoever_decodes_is_not_counted_request_by_request() -> None:
    tide = tide_that_needs(20, 60, free=8)
    tide.memory.has = 60
    tide._foresight.grow(8)
    assert tide.memory.grown == []
    tide._foresight.grow(9)
    assert tide.memory.grown == [52]


def test_memory_comes_for_some_steps_at_once() -> None:
    """What others give, or other processes map, is there a step or two later."""
    tide = tide_that_needs(20, 60, free=3)
    tide.memory.has = 60
    tide._foresight.grow()
    assert tide.memory.grown == [57]
    assert tide.memory.wished_ahead == []


def test_a_first_step_waits_for_its_own_memory_alone() -> None:
    """Nothing computes meanwhile; what the ones after it need comes while it does."""
    tide = tide_that_needs(20, 60, free=3)
    tide._scheduler.running = []
    tide.memory.has = 60
    tide._foresight.grow()
    assert tide.memory.grown == [17]
    tide._scheduler.running = [object()]
    tide._pool.free.count = tide.memory.free_count = 20
    tide._foresight.grow()
    assert tide.memory.grown == [17, 40]
    assert tide.memory.wished_ahead == []


def test_where_a_first_step_finds_none_all_is_wished_for_at_once() -> None:
    tide = tide_that_needs(20, 60, free=3)
    tide._scheduler.running = []
    tide._foresight.grow()
    assert tide.memory.grown == [17], "the same was asked for twice"
    assert tide.memory.wished_ahead == [(57, 17)]


def test_other_processes_map_for_some_steps_before_the_first_one_too() -> None:
    tide = tide_that_needs(20, 60, free=3)
    tide._scheduler.running = []
    tide.memory.ranks.direct = False
    tide.memory.has = 60
    tide._foresight.grow()
    assert tide.memory.grown == [57]


def test_where_there_is_not_so_much_the_next_step_is_seen_to_and_the_rest_is_wished_for() -> None:
    tide = tide_that_needs(20, 60, free=3)
    tide.memory.has = 20
    tide._foresight.grow()
    assert tide.memory.grown == [57, 17]
    assert tide.memory.wished_ahead == [(57, 17)]
    tide._pool.free.count = tide.memory.free_count = 20
    tide._foresight.grow()
    tide.end(SimpleNamespace(total_num_scheduled_tokens=1))
    assert tide.memory.grown == [57, 17], "what was refused is not asked again in each step"
    assert tide.memory.wishing, "nor is its wish given up"
    tide._pool.free.count = tide.memory.free_count = 60
    tide._foresight.grow()
    tide.end(SimpleNamespace(total_num_scheduled_tokens=1))
    assert not tide.memory.wishing


@pytest.mark.parametrize(
    ("free", "needed_soon", "asked"),
    [(3, 43, (5, 40)), (0, 2, (8, 8))],
    ids=["all that the next steps need", "never less than it missed"],
)
def test_a_miss_wishes_for_more_than_one_request(
    free: int, needed_soon: int, asked: tuple[int, int]
) -> None:
    memory: Any = Memory()
    tide: Any = Tide.__new__(Tide)
    tide.memory, tide._missed_at, tide._probe_seconds = memory, 0.0, 60.0
    tide._pool = SimpleNamespace(
        free=SimpleNamespace(count=free),
        free_block_queue=SimpleNamespace(num_free_blocks=0),
        get_num_free_blocks=lambda: free,
    )
    tide._need = SimpleNamespace(blocks=lambda: needed_soon)
    coordinator = SimpleNamespace(get_num_blocks_to_allocate=lambda: 8)
    tide._measure_allocations(coordinator)

    assert coordinator.get_num_blocks_to_allocate() == 8
    assert memory.asked == [asked]
    assert tide._shortfall == 8 - free
    # Refused once, it is not asked again in this step.
    coordinator.get_num_blocks_to_allocate()
    assert len(memory.asked) == 1
