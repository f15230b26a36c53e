"""Plans: splits, kinds, states, drafts, and refusals that are exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.errors import UsageError
from kvtide.sizing.errors import ConfigError, DoesNotFitError
from kvtide.sizing.layers import Kind
from kvtide.sizing.model import model_from_config, read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request
from kvtide.units import GIB, MIB

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
ENGINES = ["vllm", "sglang"]
PAIRS = [
    (name, engine)
    for name in NAMES
    for engine in ENGINES
    if engine == "vllm" or not name.startswith(("jamba", "minimax-text"))
]


def config(name: str, **changes) -> dict:
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


def model(name: str, **changes):
    return model_from_config(config(name, **changes), name=name, file=f"{name}.json")


def test_there_is_a_configuration_of_every_promised_family():
    wanted = (
        "llama-2",
        "llama-3",
        "llama-4",
        "mistral",
        "mixtral",
        "qwen2-7b",
        "qwen2.5",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "qwen3-next",
        "qwen3.5",
        "gemma-2",
        "gemma-3-27b",
        "gemma-3n",
        "gemma-4",
        "phi-3",
        "phi-4",
        "gpt-oss",
        "deepseek-v2",
        "deepseek-v3",
        "deepseek-v3.2",
        "kimi-k2",
        "glm-4.5",
        "minimax",
        "jamba",
        "falcon-h1",
        "nemotron-h",
        "granite-4",
        "lfm2",
        "mamba2",
        "whisper",
    )
    assert [w for w in wanted if not any(name.startswith(w) for name in NAMES)] == []


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_every_allocation_is_listed_and_the_sum_is_bounded(name, engine):
    found = model(name)
    request = Request(engine=engine, max_model_len=min(found.max_model_len or 8192, 8192))
    budget = 30 * GIB + 4097
    plan = make_plan(found, request, budget)
    for rank in plan.ranks:
        assert sum(a.bytes for a in rank.allocations) == rank.allocated_bytes <= budget
        named = {layer for a in rank.allocations for layer in a.layers}
        assert named >= {layer.name for layer in found.layers}


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_the_smallest_budget_works_and_one_byte_less_does_not(name, engine):
    found = model(name)
    request = Request(engine=engine, max_model_len=min(found.max_model_len or 8192, 8192))
    smallest = make_plan(found, request, 60 * GIB).smallest_budget_bytes
    plan = make_plan(found, request, smallest)
    assert plan.smallest_budget_bytes == smallest
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(found, request, smallest - 1)
    assert refusal.value.smallest_budget_bytes == smallest
    assert str(smallest) in str(refusal.value)


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_the_longest_max_model_len_fits_and_one_token_more_does_not(name, engine):
    found = model(name)
    length = min(found.max_model_len or 8192, 8192)
    request = Request(engine=engine, max_model_len=length)
    budget = make_plan(found, request, 60 * GIB).smallest_budget_bytes * 3 // 4
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(found, request, budget)
    longest = refusal.value.longest_max_model_len
    assert 0 <= longest < length
    if longest:
        assert make_plan(found, replace(request, max_model_len=longest), budget).num_blocks > 0
        assert str(longest) in str(refusal.value)
    with pytest.raises(DoesNotFitError):
        make_plan(found, replace(request, max_model_len=longest + 1), budget)


def test_tp_splits_heads_and_replicates_them_when_there_are_fewer():
    found = model("llama-3.1-8b")
    tokens = {tp: make_plan(found, Request(tp=tp), 20 * GIB).num_tokens for tp in (1, 2, 8, 16)}
    assert tokens[2] == 2 * tokens[1]
    assert tokens[8] == tokens[16] == 8 * tokens[1]
    ranks = make_plan(found, Request(tp=8), 20 * GIB).ranks
    assert len(ranks) == 8
    assert {replace(r, rank=0, tp_rank=0) for r in ranks} == {replace(ranks[0], rank=0, tp_rank=0)}


def test_tp_that_neither_divides_nor_replicates_is_an_error_with_the_layer():
    with pytest.raises(ConfigError, match=r"model\.layers\.0.*10 KV heads.*3 tensor parallel"):
        make_plan(model("phi-4"), Request(tp=3), 20 * GIB)


def test_mla_and_its_indexer_are_on_every_tensor_parallel_rank():
    found = model("deepseek-v3.2")
    one, eight = (make_plan(found, Request(tp=tp, max_model_len=4096), 9 * GIB) for tp in (1, 8))
    assert one.num_tokens == eight.num_tokens
    assert one.binding.bytes_per_token == 61 * (576 * 2 + 132)


def test_dsa_in_fp8_takes_656_bytes_a_token_and_plain_mla_576():
    sparse = make_plan(model("deepseek-v3.2"), Request(kv_dtype="fp8", max_model_len=4096), 9 * GIB)
    plain = make_plan(model("deepseek-v3"), Request(kv_dtype="fp8", max_model_len=4096), 9 * GIB)
    assert sparse.binding.bytes_per_token == 61 * (656 + 132)
    assert plain.binding.bytes_per_token == 61 * 576


def test_pp_names_the_stage_that_binds():
    plan = make_plan(model("llama-3.1-70b", num_hidden_layers=31), Request(pp=4), 20 * GIB)
    held = [len(rank.allocations) for rank in plan.ranks]
    assert held == [7, 8, 9, 7] or held == [8, 8, 8, 7]
    assert plan.binding_rank == held.index(max(held))
    assert plan.binding.blocks_that_fit == plan.num_blocks
    assert all(rank.num_blocks == plan.num_blocks for rank in plan.ranks)
    assert plan.ranks[-1].blocks_that_fit > plan.num_blocks
    assert plan.ranks[-1].allocated_bytes < plan.binding.allocated_bytes


def test_more_stages_than_layers_is_an_error():
    with pytest.raises(ConfigError, match="16 layers"):
        make_plan(model("lfm2-1.2b"), Request(pp=17), GIB)


def test_layers_that_share_kv_keep_nothing_on_vllm_and_buffers_on_sglang():
    found = model("gemma-4-e4b")
    assert len(found.layers) == 24
    assert {shared.of for shared in found.shared if shared.kind is Kind.FULL} == {
        "language_model.model.layers.23.self_attn.attn"
    }
    named = {
        engine: {
            layer
            for a in make_plan(
                found, Request(engine=engine, max_model_len=4096), GIB
            ).binding.allocations
            for layer in a.layers
        }
        for engine in ENGINES
    }
    assert len(named["vllm"]) == 24
    assert len(named["sglang"]) == 42


def test_own_draft_layers_are_listed_only_when_they_draft():
    found = model("deepseek-v3.2")
    kinds = {}
    for k in (0, 2):
        plan = make_plan(found, Request(max_model_len=4096, speculative_tokens=k), 9 * GIB)
        kinds[k] = [a.kind for a in plan.binding.allocations]
    assert not any("draft" in kind for kind in kinds[0])
    assert [kind for kind in kinds[2] if "draft" in kind] == ["draft mla", "draft mla_indexer"]


def test_a_draft_model_adds_its_layers_to_the_last_stage():
    draft = model("qwen3-8b", num_hidden_layers=2)
    request = Request(pp=2, speculative_tokens=4, draft=draft, max_model_len=4096)
    plan = make_plan(model("qwen3-8b"), request, 8 * GIB)
    assert [len(rank.allocations) for rank in plan.ranks] == [18, 20]
    assert plan.binding_rank == 1


def test_chunked_layers_keep_all_tokens_beside_a_draft_model():
    draft = read_model(CONFIGS / "drafts" / "llama-3.1-8b-eagle3.json")
    request = Request(max_model_len=65536, max_num_batched_tokens=2048)
    alone = make_plan(model("llama-4-scout"), request, 20 * GIB)
    drafted = replace(request, speculative_tokens=3, draft=draft)
    plan = make_plan(model("llama-4-scout"), drafted, 20 * GIB)
    assert len(alone.binding.allocations) == 12
    assert len(plan.binding.allocations) == 49
    assert plan.smallest_budget_bytes > 2 * alone.smallest_budget_bytes


def test_states_grow_with_speculative_tokens_on_vllm():
    found = model("qwen3-next-80b-a3b")
    notes = {
        k: make_plan(
            found, Request(max_model_len=4096, max_num_seqs=8, speculative_tokens=k), 9 * GIB
        ).notes
        for k in (0, 3)
    }
    assert any("6 blocks a sequence, 48 for max_num_seqs 8" in note for note in notes[0])
    assert any("15 blocks a sequence, 120 for max_num_seqs 8" in note for note in notes[3])


def test_sglang_lists_slots_and_speculative_states():
    request = Request(engine="sglang", max_model_len=4096, max_num_seqs=8, speculative_tokens=3)
    plan = make_plan(model("qwen3-next-80b-a3b"), request, 12 * GIB)
    speculative = [a for a in plan.binding.allocations if a.kind.startswith("speculative")]
    assert len(speculative) == 36
    assert {a.count for a in speculative} == {(8 + 1) * 4}


def test_the_weights_decide_the_kv_dtype_only_where_they_say_so():
    fp8_weights = model("deepseek-v3")
    assert make_plan(fp8_weights, Request(max_model_len=4096), GIB).kv_dtype == "bfloat16"
    asking = [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
    ]
    for quantization in asking:
        found = model("llama-3.1-8b", quantization_config=quantization)
        plan = make_plan(found, Request(max_model_len=4096), GIB)
        assert plan.kv_dtype == "fp8"
        assert plan.binding.bytes_per_token == 65536
        assert "weights" in plan.notes[0]
        told = make_plan(found, Request(max_model_len=4096, kv_dtype="bfloat16"), GIB)
        assert told.binding.bytes_per_token == 131072


def test_a_kv_dtype_that_cannot_be_sized_is_an_error():
    scheme = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}
    found = model("llama-3.1-8b", quantization_config=scheme)
    with pytest.raises(ConfigError, match=r"llama-3.1-8b.json.*NVFP4.*kv-dtype"):
        make_plan(found, Request(max_model_len=4096), GIB)
    assert make_plan(found, Request(max_model_len=4096, kv_dtype="fp8"), GIB).kv_dtype == "fp8"


def test_a_modelopt_file_beside_the_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("llama-3.1-8b")))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    )
    assert read_model(tmp_path).weights_kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"engine": "tgi"}, "'tgi' is not one of vllm, sglang"),
        ({"kv_dtype": "int3"}, "int3"),
        ({"speculative_tokens": -1}, "speculative_tokens is -1"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields, match):
    with pytest.raises(UsageError, match=match):
        Request(**fields)


def test_without_a_length_anywhere_the_plan_asks_for_it():
    found = model("llama-3.1-8b", max_position_embeddings=None)
    with pytest.raises(ConfigError, match="max-model-len"):
        make_plan(found, Request(), GIB)


def test_a_model_that_the_engine_does_not_have_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"jamba.*SGLang 0\.5\.20 has no"):
        make_plan(model("jamba-v0.1"), Request(engine="sglang"), GIB)


def test_a_budget_of_nothing_is_refused_with_what_works():
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(model("llama-3.1-8b"), Request(max_model_len=16), 0)
    assert refusal.value.longest_max_model_len == 0
    assert refusal.value.smallest_budget_bytes == 4 * MIB


def test_states_and_kv_follow_the_dtypes_that_the_engine_was_told():
    found = read_model(CONFIGS / "mamba2-2.7b.json")

    def state_bytes(**told) -> int:
        request = Request(max_model_len=2048, max_num_seqs=8, **told)
        return make_plan(found, request, 8 * GIB).binding.bytes_per_block

    narrow = state_bytes()
    wide = state_bytes(conv_dtype="float32", state_dtype="float32")
    assert narrow < state_bytes(state_dtype="float32") < wide == 2 * narrow
    told = read_model(CONFIGS / "mamba2-2.7b.json", dtype="float32")
    assert {(s.conv_dtype, s.state_dtype) for s in told.layers} == {("float32", "float32")}
    # Weights in float32 are run in bfloat16, unless the engine was told otherwise.
    assert model("llama-3.1-8b", torch_dtype="float32").dtype == "bfloat16"
    assert read_model(CONFIGS / "llama-3.1-8b.json", dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    "more", [{"max_model_len": 10**21}, {"max_num_seqs": 1 << 31}, {"tp": 1_000_000}, {"tp": 0}]
)
def test_figures_that_no_engine_takes_are_refused_at_once(more):
    (name,) = more
    with pytest.raises(UsageError, match=f"{name} is .*must be"):
        Request(**more)
