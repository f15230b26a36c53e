"""What vLLM's scheduler misses, of an engine whose only rank is in its own process."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm.tide import Tide

pytestmark = pytest.mark.torch


class Memory:
    """Refuses all, and notes what was asked for."""

    def __init__(self) -> None:
        self.ranks = SimpleNamespace(direct=True)
        self.asked: list[tuple[int, int]] = []

    def grow_for(self, blocks: int, desired: int) -> bool:
        self.asked.append((blocks, desired))
        return False


def test_a_miss_wishes_for_all_that_the_next_steps_need_and_not_for_one_request_alone() -> None:
    memory: Any = Memory()
    tide: Any = Tide.__new__(Tide)
    tide.memory, tide._missed_at, tide._probe_seconds = memory, 0.0, 60.0
    tide._pool = SimpleNamespace(get_num_free_blocks=lambda: 3)
    tide._need = SimpleNamespace(blocks=lambda: 43)
    coordinator = SimpleNamespace(get_num_blocks_to_allocate=lambda: 8)
    tide._measure_allocations(coordinator)

    assert coordinator.get_num_blocks_to_allocate() == 8
    assert memory.asked == [(5, 40)]
    assert tide._shortfall == 5
    # Refused once, it is not asked again in this step.
    coordinator.get_num_blocks_to_allocate()
    assert len(memory.asked) == 1


def test_a_miss_never_asks_for_less_than_it_missed() -> None:
    memory: Any = Memory()
    tide: Any = Tide.__new__(Tide)
    tide.memory, tide._missed_at, tide._probe_seconds = memory, 0.0, 60.0
    tide._pool = SimpleNamespace(get_num_free_blocks=lambda: 0)
    tide._need = SimpleNamespace(blocks=lambda: 2)
    coordinator = SimpleNamespace(get_num_blocks_to_allocate=lambda: 8)
    tide._measure_allocations(coordinator)

    coordinator.get_num_blocks_to_allocate()
    assert memory.asked == [(8, 8)]
