"""The command, its JSON and its table, and the gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvtide.commands.plan import register
from kvtide.sizing.errors import DoesNotFitError
from kvtide.sizing.gate import check, compare
from kvtide.sizing.rows import Allocation, Row, allocations, invert, stages, total_bytes
from kvtide.units import GIB

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
LLAMA = str(CONFIGS / "llama-3.1-8b.json")

KEYS = {
    "engine", "model", "block_size", "num_blocks", "num_tokens", "bytes_per_token",
    "bytes_per_block", "max_concurrency", "budget_bytes", "allocated_bytes", "allocations",
    "binding_rank", "ranks", "notes",
}  # fmt: skip


@pytest.fixture
def app() -> typer.Typer:
    application = typer.Typer()
    register(application)
    application.command("other")(lambda: None)
    return application


def invoke(app: typer.Typer, *arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_json_has_the_promised_keys_and_sums(app):
    result = invoke(app, LLAMA, "--kv-memory", "20GiB", "--tp", "2", "--pp", "2", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert set(plan) >= KEYS
    assert len(plan["ranks"]) == 4
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1, 2, 3]
    for part in (plan, *plan["ranks"]):
        assert sum(a["bytes"] for a in part["allocations"]) == part["allocated_bytes"]
        assert part["allocated_bytes"] <= part["budget_bytes"] == 20 * GIB
        assert set(part["allocations"][0]) == {"name", "kind", "layers", "count", "bytes"}


def test_the_table_names_kinds_sums_and_what_binds(app):
    result = invoke(app, str(CONFIGS / "gpt-oss-20b.json"), "--kv-memory", "5GiB")
    assert result.exit_code == 0, result.output
    assert "sliding_window + full_attention" in result.output
    assert "5.000" in result.output
    assert "binds" in result.output
    assert "8192" in result.output  # the batch that windows were planned with


def test_device_memory_takes_the_share_less_weights_and_activations(app):
    result = invoke(
        app, LLAMA, "--device-memory", "80GiB", "--utilization", "0.9", "--weights", "15GiB",
        "--non-kv", "2GiB", "--json",
    )  # fmt: skip
    assert json.loads(result.output)["budget_bytes"] == 55 * GIB


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--kv-memory", "1GiB", "--device-memory", "2GiB"),
        ("--kv-memory", "1GiB", "--weights", "1GiB"),
        ("--kv-memory", "lots"),
        ("--device-memory", "8GiB", "--weights", "8GiB"),
        ("--kv-memory", "1GiB", "--tp", "0"),
    ],
)
def test_what_cannot_be_understood_ends_with_status_2(app, arguments):
    error = invoke(app, LLAMA, *arguments).exception
    assert getattr(error, "exit_status", 2) == 2


def test_a_refusal_is_an_error_and_in_json_an_object_with_status_1(app):
    arguments = (LLAMA, "--kv-memory", "1GiB", "--max-model-len", "100000")
    assert isinstance(invoke(app, *arguments).exception, DoesNotFitError)
    result = invoke(app, *arguments, "--json")
    assert result.exit_code == 1
    refusal = json.loads(result.output)
    assert refusal["longest_max_model_len"] == 8176
    assert refusal["smallest_budget_bytes"] == (100000 // 16 + 1) * 131072 * 16
    assert "100000" in refusal["error"]


def test_planning_imports_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from kvtide.sizing.model import read_model\n"
        "from kvtide.sizing.plan import make_plan\n"
        "from kvtide.sizing.report import plan_json\n"
        "from kvtide.sizing.request import Request\n"
        f"plan_json(make_plan(read_model({LLAMA!r}), Request(), {40 * GIB}))\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'vllm') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def kv(layers: int, each_bytes: int) -> list[Allocation]:
    return [
        Allocation(f"model.layers.{i}", "full_attention", (f"model.layers.{i}",), 4, each_bytes)
        for i in range(layers)
    ]


def test_the_gate_holds_the_sum_of_real_allocations_against_the_budget():
    assert check(kv(4, GIB), 4 * GIB).fits
    verdict = check(kv(4, GIB), 4 * GIB - 1, who="vllm-llama")
    assert not verdict.fits
    assert verdict.allocated_bytes == 4 * GIB
    assert "vllm-llama" in verdict.message
    assert "model.layers.0" in verdict.message
    assert str(4 * GIB - 1) in verdict.message


def test_the_gate_refuses_the_old_fault():
    """One layer a group divided for, one buffer a layer allocated: 6 GiB asked for, 96 taken."""
    blocks = invert([Row("one layer", "full_attention", (), 131072, lambda n: n)], 3 * GIB)
    real = [
        Allocation(f"l{i}", "full_attention", (f"l{i}",), blocks, blocks * 131072)
        for i in range(16)
    ]
    assert blocks == 24_576
    assert not check(real, 6 * GIB).fits


def test_compare_marks_lines_that_differ_by_more_than_one_percent():
    lines = compare(
        {"KV": 1000, "state": 100, "weights": 0}, {"KV": 1010, "state": 102, "graphs": 5}
    )
    assert [(x.kind, x.differs) for x in lines] == [
        ("KV", False), ("state", True), ("weights", False), ("graphs", True),
    ]  # fmt: skip


def test_the_sum_and_its_inverse_are_one_function():
    rows = [
        Row("a", "x", (), 7, lambda n: 3 * n + 1),
        Row("b", "y", (), 5, lambda n: n // 2),
        Row("none", "z", (), 5, lambda _: 0),
    ]
    for budget in range(400):
        blocks = invert(rows, budget)
        if blocks < 0:
            assert total_bytes(rows, 0) > budget
            continue
        assert total_bytes(rows, blocks) <= budget < total_bytes(rows, blocks + 1)
        listed = allocations(rows, blocks)
        assert sum(a.bytes for a in listed) == total_bytes(rows, blocks)
        assert "none" not in {a.name for a in listed}


def test_stages_split_as_the_engines_do():
    assert [len(s) for s in stages(32, 4)] == [8, 8, 8, 8]
    assert [len(s) for s in stages(61, 4)] == [15, 15, 16, 15]
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            split = stages(layers, pp)
            assert [i for s in split for i in s] == list(range(layers))
