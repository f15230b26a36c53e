"""The plan against vLLM's own KV-cache code, on models that vLLM's own classes build."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.sizing.errors import DoesNotFitError
from kvtide.sizing.model import read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request
from kvtide.sizing.vllm_rule import VllmRule
from kvtide.units import GIB

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
BUDGET = 48 * GIB + 12345

# Configuration, and what differs from one rank with 8192 tokens and vLLM's own block size. The
# text parts of multimodal models whose processors need packages that the CPU build lacks are
# built as the text model that they hold.
CASES: dict[str, dict] = {
    "llama-2-7b": {"max_model_len": 4096},
    "llama-3.1-8b": {},
    "llama-3.1-70b tp4": {"tp": 4},
    "llama-3.1-70b tp16 replicates": {"tp": 16},
    "llama-3.1-70b pp3": {"pp": 3},
    "llama-3.1-8b fp8": {"kv_dtype": "fp8"},
    "llama-3.1-8b eagle3": {
        "draft": str(CONFIGS / "drafts" / "llama-3.1-8b-eagle3.json"),
        "method": "eagle3",
        "speculative_tokens": 3,
    },
    "qwen3-8b dflash": {
        "draft": str(CONFIGS / "drafts" / "qwen3-8b-dflash.json"),
        "method": "dflash",
        "speculative_tokens": 15,
    },
    "llama-4-scout": {"text_architecture": "Llama4ForCausalLM", "max_model_len": 20000},
    "llama-4-scout eagle3": {
        "text_architecture": "Llama4ForCausalLM",
        "max_model_len": 20000,
        "draft": str(CONFIGS / "drafts" / "llama-3.1-8b-eagle3.json"),
        "method": "eagle3",
        "speculative_tokens": 3,
    },
    "gpt-oss-20b eagle3": {
        "draft": str(CONFIGS / "drafts" / "llama-3.1-8b-eagle3.json"),
        "method": "eagle3",
        "speculative_tokens": 3,
    },
    "mistral-7b-v0.1": {"max_model_len": 32768},
    "mixtral-8x7b": {},
    "qwen2-7b": {},
    "qwen2.5-72b": {},
    "qwen3-8b block32": {"block_size": 32},
    "qwen3-30b-a3b": {},
    "qwen3-next-80b-a3b": {},
    "qwen3-next-80b-a3b tp2": {"tp": 2},
    "qwen3-next-80b-a3b pp2": {"pp": 2},
    "qwen3-next-80b-a3b mtp": {"speculative_tokens": 3},
    "qwen3.5-27b": {"text_architecture": "Qwen3_5ForCausalLM"},
    "qwen3.5-27b mtp": {"text_architecture": "Qwen3_5ForCausalLM", "speculative_tokens": 2},
    "gemma-2-9b": {},
    "gemma-3-1b": {"max_model_len": 32768},
    "gemma-3-1b pp3": {"max_model_len": 32768, "pp": 3},
    "gemma-3-27b": {"text_architecture": "Gemma3ForCausalLM"},
    # Its constructor reads values, which meta tensors lack: what KV does not depend on is smaller.
    "gemma-3n-e4b": {
        "text_architecture": "Gemma3nForCausalLM",
        "smaller": {
            "hidden_size": 64,
            "intermediate_size": [64] * 35,
            "vocab_size": 256,
            "vocab_size_per_layer_input": 256,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
        },
    },
    "gemma-4-31b": {},
    "gemma-4-e4b": {},
    "phi-3-mini-4k": {"max_model_len": 4096},
    "phi-4": {},
    "gpt-oss-20b": {"max_model_len": 65536},
    "gpt-oss-20b tp2": {"tp": 2},
    "deepseek-v2-lite": {},
    "deepseek-v3": {},
    "deepseek-v3 mtp": {"speculative_tokens": 2},
    "deepseek-v3 indexer": {"plan": "deepseek-v3.2", "indexer_bytes": 132},
    "kimi-k2": {},
    "glm-4.5-air": {},
    "glm-4.5-air mtp": {"speculative_tokens": 1},
    "minimax-m2": {},
    "jamba-v0.1": {},
    "falcon-h1-7b": {},
    "nemotron-h-8b": {},
    "granite-4.0-h-small": {},
    "granite-4.0-h-small tp2": {"tp": 2},
    "lfm2-1.2b": {},
    "mamba2-2.7b": {},
    "mamba-2.8b": {},
    "whisper-large-v3": {"max_model_len": 448},
    # Block-outermost, where pages of several sizes lie side by side.
    "gemma-4-31b packed": {"layout": "BLHNC"},
    "gemma-4-e4b packed": {"layout": "BLHNC"},
    "gemma-4-31b packed pp3": {"layout": "BLHNC", "pp": 3},
    "gemma-3-27b packed": {"layout": "BLHNC", "text_architecture": "Gemma3ForCausalLM"},
    "qwen3-next-80b-a3b packed": {"layout": "BLHNC"},
    "gpt-oss-20b packed eagle3": {
        "layout": "BLHNC",
        "draft": str(CONFIGS / "drafts" / "llama-3.1-8b-eagle3.json"),
        "method": "eagle3",
        "speculative_tokens": 3,
    },
    # Model types of which only names, heads and windows differ, with their classes' own sizes.
    **{
        f"{model_type}-class-defaults": {"max_model_len": 2048}
        for model_type in (
            *("jais2", "hyperclovax", "phimoe", "glm4_moe_lite", "cwm", "granite_swa"),
            *("arcee", "cohere", "ernie4_5", "ernie4_5_moe", "exaone4", "glm", "gpt_neox"),
            *("granitemoe", "granitemoeshared", "hy_v3", "ministral3", "nemotron", "olmo"),
            *("olmo2", "olmoe", "opt", "phi", "seed_oss", "smollm3", "stablelm"),
        )
    },
    "cohere2-class-defaults": {},
    "cohere2-class-defaults tp2": {"tp": 2},
    "olmo3-class-defaults": {},
}


def full(name: str) -> dict:
    case = {"tp": 1, "pp": 1, "max_model_len": 8192, "max_num_seqs": 32, "budget_bytes": BUDGET}
    case.update(CASES[name])
    case["config"] = str(CONFIGS / f"{name.split()[0]}.json")
    return case


def request_for(case: dict, found: dict | None = None) -> Request:
    return Request(
        tp=case["tp"],
        pp=case["pp"],
        kv_dtype=case.get("kv_dtype", "auto"),
        block_size=case.get("block_size"),
        max_model_len=case["max_model_len"],
        max_num_seqs=case["max_num_seqs"],
        speculative_tokens=case.get("speculative_tokens", 0),
        draft=read_model(case["draft"]) if "draft" in case else None,
        max_num_batched_tokens=found["max_num_batched_tokens"] if found else 2048,
        block_outermost="layout" in case,
        platform="cpu",
    )


def model_for(case: dict):
    path = CONFIGS / f"{case['plan']}.json" if "plan" in case else Path(case["config"])
    return read_model(path)


@pytest.fixture(scope="module")
def vllm() -> dict[str, dict]:
    cases = []
    for name in CASES:
        case = full(name)
        smallest = make_plan(model_for(case), request_for(case), BUDGET).smallest_budget_bytes
        tight = smallest * 3 // 4
        cases.append({**case, "too_small_bytes": smallest - 1, "tight_bytes": tight})
    script = Path(__file__).with_name("vllm_specs.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_groups_pages_blocks_and_tokens_are_vllms(name, vllm):
    found, case = vllm[name], full(name)
    assert "error" not in found, found["error"]
    request = request_for(case, found)
    model = model_for(case)
    plan = make_plan(model, request, BUDGET)

    rule = VllmRule(model, request, plan.kv_dtype, case["max_model_len"])
    assert rule._in_flight_tokens == found["max_in_flight_tokens"]
    assert model.dtype == found["dtype"]
    assert plan.block_size == found["block_size"]
    ours = [
        (
            sorted(bare(group.layers)),
            group.specs[0].block_size,
            sum(spec.page_bytes for spec in group.specs),
        )
        for group in rule.groups
    ]
    theirs = [
        (
            sorted(name for rank in found["ranks"] for name in bare(rank["groups"][i]["layers"])),
            group["block_size"],
            sum(rank["groups"][i]["bytes_per_block"] for rank in found["ranks"]),
        )
        for i, group in enumerate(found["ranks"][0]["groups"])
    ]
    assert sorted(ours) == sorted(theirs)

    assert plan.num_blocks == found["num_blocks"]
    assert plan.num_tokens == found["num_tokens"]
    assert plan.max_concurrency == pytest.approx(found["max_concurrency"], rel=1e-12)
    stages = plan.ranks[:: case["tp"]]
    allocated = [rank.allocated_bytes for rank in stages]
    assert allocated == [rank["allocated_bytes"] for rank in found["ranks"]]
    if "layout" in case:
        return  # places of several sizes: the sum is compared above
    for rank, theirs in zip(stages, found["ranks"], strict=True):
        listed = [sorted(bare(a.layers)) for a in rank.allocations if a.kind != "padding"]
        slabs = [sorted(bare(slab)) for slab in theirs["slabs"]]
        assert sorted(listed) == sorted(slabs)


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_budget_and_the_longest_sequence_are_vllms(name, vllm):
    found, case = vllm[name], full(name)
    assert found["refused_below"] is True
    model, request = model_for(case), request_for(case)
    smallest = make_plan(model, request, BUDGET).smallest_budget_bytes
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(model, request, smallest * 3 // 4)
    assert refusal.value.longest_max_model_len == found["longest_max_model_len"]


def bare(names) -> list[str]:
    """Names without the part that only the multimodal wrapper adds."""
    return [name.removeprefix("language_model.") for name in names]
