"""The plan against SGLang's own pool configurator, for the models that it takes on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.sizing.model import read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request
from kvtide.sizing.sglang_rule import SglangRule
from kvtide.units import GIB, MIB

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
BUDGET = 20 * GIB + 12345

# DSA asks for CUDA at start, and Mamba 2's configuration lacks a field that SGLang reads.
PLAIN = (
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-4-scout",
    "mistral-7b-v0.1",
    "mixtral-8x7b",
    "qwen2-7b",
    "qwen2.5-72b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "gemma-2-9b",
    "gemma-3-1b",
    "gemma-3-27b",
    "gemma-3n-e4b",
    "phi-3-mini-4k",
    "phi-4",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
    "glm-4.5-air",
    "minimax-m2",
    "falcon-h1-7b",
    "granite-4.0-h-small",
    "nemotron-h-8b",
    "lfm2-1.2b",
    "qwen3-next-80b-a3b",
    "qwen3.5-27b",
)
CASES: dict[str, dict] = {
    **{name: {} for name in PLAIN},
    "gpt-oss-20b": {"attention_backend": "triton"},
    "gemma-4-31b": {"attention_backend": "triton"},
    "gemma-4-e4b": {"attention_backend": "triton"},
    "whisper-large-v3": {"max_model_len": 448},
    "llama-3.1-70b tp4": {"tp": 4},
    "llama-3.1-8b page64": {"block_size": 64},
    "llama-3.1-8b built": {"build": True, "budget_bytes": 320 * MIB},
    "qwen3-next-80b-a3b tp2": {"tp": 2},
}


def full(name: str) -> dict:
    case = {"tp": 1, "max_model_len": 2048, "budget_bytes": BUDGET, **CASES[name]}
    case["config"] = str(CONFIGS / f"{name.split()[0]}.json")
    return case


@pytest.fixture(scope="module")
def sglang() -> dict[str, dict]:
    script = Path(__file__).with_name("sglang_specs.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([full(name) for name in CASES])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_tokens_windows_and_slots_are_sglangs(name, sglang):
    found, case = sglang[name], full(name)
    assert "error" not in found, found["error"]
    model = read_model(case["config"])
    length, budget = case["max_model_len"], case["budget_bytes"]
    request = Request(
        engine="sglang", tp=case["tp"], block_size=case.get("block_size"), max_model_len=length
    )
    plan = make_plan(model, request, budget)
    rule = SglangRule(model, request, plan.kv_dtype, length)

    assert plan.block_size == found["page_size"]
    assert plan.engine_tokens == found["num_tokens"]
    assert rule.slots(budget) == found["slots"]
    # The plan is bounded where SGLang is not: it counts the padding page of every layer.
    assert plan.engine_tokens >= plan.num_tokens
    if not found["slots"]:
        assert plan.engine_tokens - plan.num_tokens <= 2 * plan.block_size
    if found["window_tokens"] is not None:
        counts = {a.count for a in plan.binding.allocations if "padding" not in a.kind}
        assert len(counts) == 2
        assert found["window_tokens"] - min(counts) <= 2
    if found["buffers"]:
        # What SGLang allocates for the tokens that the plan gives: one page more than it lists.
        ours = [a for a in plan.binding.allocations if a.kind == "full_attention"]
        padding = sum(a.bytes for a in plan.binding.allocations if a.kind == "padding")
        theirs = sum(map(sum, found["buffers"]))
        over = found["num_tokens"] - plan.num_tokens
        assert len(ours) == sum(map(len, found["buffers"]))
        assert sum(a.bytes for a in ours) + padding == theirs - over * plan.binding.bytes_per_token
        assert theirs > budget >= plan.binding.allocated_bytes
