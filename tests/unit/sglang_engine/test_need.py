"""How many slots an SGLang scheduler's coming steps need, and how much can ever be backed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtide.engines.sglang.fitting import bytes_of_first, most_blocks
from kvtide.engines.sglang.need import Load, read_load, states_per_request
from kvtide.pool import Geometry, Strip
from kvtide.units import MIB


def test_decoding_needs_the_steps_in_flight_and_two():
    assert Load([100, 7], 0, []).need(1, None, 0) == (6, 0, 0, 0)


def test_a_page_is_needed_only_where_one_begins():
    # 16 is full: one more; 17 has 15 slots left in its page: none.
    assert Load([16, 17, 30], 0, []).need(16, None, 0) == (2, 0, 0, 0)


def test_a_waiting_prompt_needs_its_pages_and_the_one_that_sglang_sets_aside():
    assert Load([], 0, [(100, 50)]).need(16, None, 0).full == 7 + 1


def test_a_chunk_needs_what_it_takes_up():
    assert Load([], 512, []).need(16, None, 0).full == 32 + 1


def test_a_window_needs_no_more_than_sglang_counts_for_it():
    need = Load([], 0, [(1000, 500)]).need(1, 64, 0)
    # What lies before the window is written once, then the window stays.
    assert need.window >= 1000 - 64 + 64
    assert need.window <= 1000 - 64 + 64 + 3 + 2
    assert Load([], 0, [(10, 5)]).need(1, 64, 0).window <= 15 + 3 + 2


def test_states_are_counted_by_request():
    need = Load([5, 5], 10, [(3, 3)]).need(1, None, 3)
    assert need.states == 12
    # The one that waits has none yet: free ones are wanted for it before the cache gives up any.
    assert need.fresh_states == 3


def request(prompt: int, made: int, held: int, **more) -> SimpleNamespace:
    values = {
        "origin_input_ids": [0] * prompt,
        "output_ids": [0] * made,
        "kv": SimpleNamespace(kv_allocated_len=held, holds_kv=held > 0),
        "sampling_params": SimpleNamespace(max_new_tokens=64),
        "prefix_indices": [],
        "finished": lambda: False,
    }
    return SimpleNamespace(**(values | more))


def scheduler(**more) -> SimpleNamespace:
    values = {
        "last_batch": None,
        "chunked_req": None,
        "max_prefill_tokens": 1000,
        "chunked_prefill_size": 300,
        "max_running_requests": 4,
        "waiting_queue": [],
        "tree_cache": SimpleNamespace(),
    }
    return SimpleNamespace(**(values | more))


def test_the_load_is_what_decodes_and_what_one_step_can_take_up():
    running = SimpleNamespace(reqs=[request(10, 5, 15)])
    just_begun = SimpleNamespace(reqs=[request(20, 0, 20), running.reqs[0]])
    waiting = [request(200, 0, 0), request(150, 4, 0), request(9, 0, 0)]
    load = read_load(scheduler(last_batch=just_begun, waiting_queue=waiting), running)
    assert load.running == [15, 20]
    # The step is full with the second prompt, of which all is wanted; a request that was retracted
    # has less to go.
    assert load.waiting == [(200, 64), (154, 60)]
    assert load.step == 300


def test_a_prompt_in_chunks_comes_first_and_does_not_decode():
    chunked = request(500, 0, 300, prefix_indices=[0] * 300)
    running = SimpleNamespace(reqs=[chunked])
    load = read_load(scheduler(chunked_req=chunked, waiting_queue=[request(500, 0, 0)]), running)
    assert load == Load([], 200, [(500, 64)], 300)


def test_all_of_a_long_prompt_is_wanted_and_of_its_windows_what_a_step_takes():
    (long,) = waiting = [request(2000, 0, 0)]
    load = read_load(scheduler(waiting_queue=waiting), SimpleNamespace(reqs=[]))
    need = load.need(1, 64, 0)
    assert need.full >= 2000
    assert need.window <= 300 + 64 + 5
    long.prefix_indices = [0] * 300
    long.kv.holds_kv = True
    load = read_load(scheduler(chunked_req=long), SimpleNamespace(reqs=[]))
    assert load.chunk == 1700
    assert load.need(1, 64, 0).full >= 1700
    assert load.need(1, 64, 0).window <= 300 + 64 + 5


def test_no_more_requests_than_may_run():
    running = SimpleNamespace(reqs=[request(1, 1, 2)] * 1 + [request(1, 1, 2) for _ in range(3)])
    assert read_load(scheduler(waiting_queue=[request(5, 0, 0)]), running).waiting == []


@pytest.mark.parametrize(
    ("pool", "cached", "states"),
    [
        ({}, True, 0),
        ({"mamba_pool": 1, "enable_mamba_extra_buffer": False}, True, 3),
        ({"mamba_pool": 1, "enable_mamba_extra_buffer": True}, True, 5),
        ({"mamba_pool": 1, "enable_mamba_extra_buffer": False}, False, 1),
    ],
)
def test_states_of_a_request(pool, cached, states):
    tree = SimpleNamespace(supports_mamba=lambda: cached)
    found = SimpleNamespace(req_to_token_pool=SimpleNamespace(**pool), tree_cache=tree)
    assert states_per_request(found) == states


def test_the_first_blocks_take_whole_granules_of_every_strip_once():
    row = 4096
    strips = [Strip(k * 3 * MIB, row, row) for k in range(3)]
    geometry = Geometry.of(3 * MIB // row, strips, 2 * MIB)
    assert bytes_of_first(geometry, 1) == 6 * MIB
    # 512 blocks are 2 MiB: strip 0 ends its granule, 1 and 2 reach into two, and share none.
    assert bytes_of_first(geometry, 513) == 10 * MIB
    assert bytes_of_first(geometry, geometry.blocks_total) == geometry.arena_bytes


def seat(ceiling: int, limit: int | None) -> SimpleNamespace:
    return SimpleNamespace(
        instance=SimpleNamespace(limit_bytes=limit),
        ledger=SimpleNamespace(spec=SimpleNamespace(ceiling_bytes=ceiling)),
    )


@pytest.mark.parametrize(
    ("ceiling", "limit", "ranks", "blocks"),
    [
        (64 * MIB, None, 1, 4096),
        (8 * MIB, None, 1, 2048),
        (64 * MIB, 8 * MIB, 1, 2048),
        (64 * MIB, 8 * MIB, 2, 1024),
        (2 * MIB, None, 1, 0),
    ],
)
def test_the_most_blocks_that_can_ever_be_backed(ceiling, limit, ranks, blocks):
    strips = [Strip(0, 2048, 2048), Strip(8 * MIB, 2048, 2048)]
    geometry = Geometry.of(4096, strips, 2 * MIB)
    assert most_blocks(geometry, seat(ceiling, limit), ranks) == blocks
