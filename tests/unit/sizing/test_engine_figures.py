"""Every case of `sizing.json`: figures that real engines printed, within their rounding."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.sizing.capacity import sglang_capacity, vllm_capacity
from kvtide.sizing.errors import DoesNotFitError
from kvtide.sizing.layers import Attention, State
from kvtide.sizing.model import model_from_config
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request
from kvtide.sizing.rows import Row, invert
from kvtide.units import GIB

CASES = {
    case["id"]: case
    for case in json.loads(Path(__file__).parents[2].joinpath("data/sizing.json").read_text())[
        "cases"
    ]
}
HALF_PRINTED_GIB = 0.005 * GIB
TESTED: set[str] = set()


def take(case_id: str) -> dict:
    TESTED.add(case_id)
    return CASES[case_id]


def model_of(case: dict):
    return model_from_config(case["config"], name=case["id"])


def request_of(case: dict, **more) -> Request:
    return Request(
        engine="vllm" if case["engine"] == "kvtide" else case["engine"],
        tp=case["tp"],
        block_size=case.get("block_size"),
        max_model_len=case.get("max_model_len"),
        **more,
    )


@pytest.mark.parametrize(
    "case_id", [i for i, c in CASES.items() if c["engine"] == "vllm" and "kv_memory_gib" in c]
)
def test_blocks_tokens_and_concurrency_that_vllm_printed(case_id):
    case = take(case_id)
    expect, budget = case["expect"], round(case["kv_memory_gib"] * GIB)
    model, request = model_of(case), request_of(case)
    block_bytes = expect["bytes_per_token"] * case["block_size"]
    may_differ = math.ceil(HALF_PRINTED_GIB / block_bytes)
    if expect["max_concurrency"] < 1:
        with pytest.raises(DoesNotFitError) as refusal:
            make_plan(model, request, budget)
        blocks, concurrency = refusal.value.num_blocks, refusal.value.max_concurrency
    else:
        plan = make_plan(model, request, budget)
        blocks, concurrency = plan.num_blocks, plan.max_concurrency
        assert plan.binding.bytes_per_token == expect["bytes_per_token"]
        assert plan.binding.allocated_bytes <= budget
        if "num_tokens" in expect:
            allowed = may_differ * case["block_size"]
            assert plan.num_tokens == pytest.approx(expect["num_tokens"], abs=allowed)
    if "num_blocks" in expect:
        assert blocks == pytest.approx(expect["num_blocks"], abs=may_differ)
    slack = 0.005 + may_differ * case["block_size"] / case["max_model_len"]
    assert concurrency == pytest.approx(expect["max_concurrency"], abs=slack)


def test_one_sequence_of_qwen3_coder_takes_62_gib_and_the_null_block():
    case = take("qwen3-coder-480b-need")
    plan = make_plan(model_of(case), request_of(case), 100 * GIB)
    need = round(case["expect"]["bytes_for_one_max_len_gib"] * GIB)
    assert plan.binding.bytes_per_token == case["expect"]["bytes_per_token"]
    assert plan.binding.bytes_per_token * case["max_model_len"] == need
    assert plan.smallest_budget_bytes == need + plan.binding.bytes_per_block


def test_k_and_v_that_sglang_printed():
    case = take("qwen3-30b-a3b-sglang")
    expect, tokens = case["expect"], case["num_tokens"]
    model = model_of(case)
    request = Request(engine="sglang", max_model_len=32768)
    plan = make_plan(model, request, (tokens + 1) * expect["bytes_per_token"])
    assert plan.num_tokens == tokens
    assert plan.binding.bytes_per_token == expect["bytes_per_token"]
    for half, key in (("K", "k_gib"), ("V", "v_gib")):
        found = sum(a.bytes for a in plan.binding.allocations if a.name.endswith(f" {half}"))
        assert found / GIB == pytest.approx(expect[key], abs=0.005)


HYBRID = "qwen3-next-shape-6gib-seqs32"


def hybrid(**more) -> tuple:
    case = take(HYBRID)
    model = model_of(case)
    heads = {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 256}
    draft = model_from_config(
        {
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "num_attention_heads": 24,
            "hidden_size": 5120,
            "max_position_embeddings": 32768,
            **heads,
        },
        name="draft",
    )
    assert len(draft.layers) == case["draft_full_attention_layers"]
    request = request_of(
        case,
        max_num_seqs=case["max_num_seqs"],
        speculative_tokens=case["num_speculative_tokens"],
        draft=draft,
    )
    return case, model, replace(request, **more)


def test_the_layers_of_the_hybrid_and_their_bytes():
    case, model, request = hybrid()
    expect = case["expect"]
    attention = [layer for layer in model.layers if isinstance(layer, Attention)]
    states = [layer for layer in model.layers if isinstance(layer, State)]
    assert len(attention) == expect["full_attention_layers"]
    assert len(states) == expect["linear_attention_layers"]
    page = attention[0].token_bytes(1, "bfloat16") * case["block_size"]
    assert page == expect["attention_page_bytes_per_layer"]
    state_bytes = states[0].bytes(1, request.speculative_tokens)
    assert state_bytes == expect["state_bytes_per_slot_per_layer"]
    # All slots beside the cache, as the faulty engine had them: the 43.40 GiB.
    slots = case["max_num_seqs"] * (request.speculative_tokens + 1)
    assert slots * len(states) * state_bytes / GIB == pytest.approx(43.40, abs=0.005)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_attention_draft_and_state_of_the_hybrid_stay_within_6_gib_or_are_refused(engine):
    case, model, request = hybrid(engine=engine)
    budget = round(case["kv_memory_gib"] * GIB)
    try:
        plan = make_plan(model, request, budget)
    except DoesNotFitError as refusal:
        smallest = refusal.smallest_budget_bytes
        plan = make_plan(model, request, smallest)
        assert smallest > budget
        with pytest.raises(DoesNotFitError):
            make_plan(model, request, smallest - 1)
        budget = smallest
    listed = plan.binding.allocations
    assert sum(allocation.bytes for allocation in listed) == plan.binding.allocated_bytes <= budget
    named = {name for allocation in listed for name in allocation.layers}
    layers = [*model.layers, *request.draft.layers]
    assert len(named) == len(layers) == 16 + 48 + 1
    assert plan.num_blocks < 24_576


def test_stable_capacity_of_sglang_on_a_t4():
    case = take("stable-capacity-sglang-t4")
    capacity = sglang_capacity(case["total_bytes"], case["mem_fraction_static"])
    assert capacity == case["expect"]["capacity_bytes"]
    rows = [Row("KV", "full_attention", (), case["bytes_per_token"], lambda n: n)]
    assert invert(rows, capacity) == case["expect"]["num_tokens"]


def test_stable_capacity_of_vllm_on_an_a100():
    case = take("stable-capacity-vllm-a100")
    capacity = vllm_capacity(
        math.ceil(case["requested_gib"] * GIB / 0.92),
        0.92,
        weights_bytes=round(case["weights_gib"] * GIB),
        torch_peak_bytes=round(case["torch_peak_gib"] * GIB),
    )
    assert capacity / GIB == pytest.approx(case["expect"]["capacity_gib"], abs=0.015)


def test_no_case_is_left_out():
    assert set(CASES) == TESTED
