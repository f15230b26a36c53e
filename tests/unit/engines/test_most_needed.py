"""What a vLLM engine's coming steps can need at the most, without a look at each request."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm.need import Need

pytestmark = pytest.mark.torch


def group(block_tokens: int, **more: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_tokens, **more))


def request(computed: int, tokens: int) -> Any:
    return SimpleNamespace(
        num_computed_tokens=computed,
        num_tokens=tokens,
        num_tokens_with_spec=tokens,
        num_output_placeholders=0,
    )


def scheduler_of(*groups: Any, speculative: int = 0) -> Any:
    return SimpleNamespace(
        waiting=[],
        skipped_waiting=[],
        running=[],
        max_num_scheduled_tokens=64,
        max_num_running_reqs=8,
        num_spec_tokens=speculative,
        num_lookahead_tokens=speculative,
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )


def test_requests_that_decode_need_a_block_each_and_group() -> None:
    scheduler = scheduler_of(group(16), group(16, sliding_window=128))
    scheduler.running = [request(40, 41), request(99, 99)]
    assert Need(scheduler).most() == 4


@pytest.mark.parametrize("queue", ["waiting", "skipped_waiting"])
def test_it_is_not_known_while_somebody_waits_or_has_not_read_all_of_a_prompt(queue: str) -> None:
    scheduler = scheduler_of(group(16))
    need = Need(scheduler)
    scheduler.running = [request(40, 41)]
    assert need.most() == 1
    vars(scheduler)[queue].append(request(0, 100))
    assert need.most() is None
    scheduler.running += vars(scheduler)[queue]
    vars(scheduler)[queue].clear()
    scheduler.running[1].num_computed_tokens = 64
    assert need.most() is None
    scheduler.running[1].num_computed_tokens = 100
    assert need.most() == 2


def test_tokens_that_are_not_there_yet_are_scheduled_too() -> None:
    scheduler = scheduler_of(group(16))
    scheduler.running = [request(40, 40)]
    scheduler.running[0].num_output_placeholders = 2
    need = Need(scheduler)
    assert need.most() is None
    scheduler.running[0].num_computed_tokens = 41
    assert need.most() == 1


def test_it_is_not_known_of_states_that_do_not_grow_by_the_token() -> None:
    scheduler = scheduler_of(group(16), group(544, mamba_type="gdn"))
    scheduler.running = [request(40, 41)]
    assert Need(scheduler).most() is None


@given(
    st.integers(1, 64),
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 10)), max_size=8),
)
def test_it_is_never_less_than_what_each_needs(
    block_tokens: int, speculative: int, requests: list[tuple[int, int]]
) -> None:
    scheduler = scheduler_of(group(block_tokens), speculative=speculative)
    scheduler.running = [
        request(computed, computed + min(lacks, 1 + speculative)) for computed, lacks in requests
    ]
    need = Need(scheduler)
    most = need.most()
    assert most is not None
    assert most >= need.ahead().far
