"""What real servers allocate is what the plan says, allocation by allocation; more is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fleet import Fleet, until

from kvtide.observe.census import take_census
from kvtide.units import MIB

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

DEVICE_BYTES = 64 * MIB + 6 * MIB  # the capacity is no round number of blocks

# What the KV and state of each are, and the kinds of the allocations.
KINDS = {
    "llama": {"full_attention"},
    "gemma3": {"sliding_window + full_attention"},
    "qwen3next": {"gated_delta_net + full_attention"},
    "mamba2": {"mamba2"},
    "deepseek": {"mla"},
}


@pytest.fixture
def fleet(make_fleet: Callable[[int], Fleet]):
    fleet = make_fleet(DEVICE_BYTES)
    yield fleet
    fleet.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_allocations_are_the_plans(fleet: Fleet, kind: str) -> None:
    fleet.start(kind, "a", "--max-model-len", "1024", "--max-num-seqs", "8").wait_ready()
    (rank,) = take_census(fleet.ledgers, "a").ranks
    print(rank)
    assert rank.unplanned is None
    assert rank.budget_bytes == int(0.92 * DEVICE_BYTES)
    assert rank.allocations
    assert [line for line in rank.allocations if line.planned_bytes != line.found_bytes] == []
    asked = sum(line.found_bytes for line in rank.allocations)
    block = fleet.instance("a").pools[0]
    assert asked == block.blocks_total * block.block_bytes
    assert rank.budget_bytes - block.block_bytes < asked <= rank.budget_bytes
    kinds = {line.name: line for line in rank.kinds}
    assert kinds["weights"].found_bytes > 0
    both = kinds.keys() & {"kv", "state"}
    assert both == ({"state"} if kind == "mamba2" else {"kv"})
    assert sum(kinds[name].found_bytes for name in both) == asked
    # Now, when nothing runs, by the ledger and by the kernel.
    assert rank.mapped_bytes == rank.charged_bytes == rank.kernel_bytes > 0
    assert _allocated_kinds(fleet) == KINDS[kind]


def test_the_command_says_the_same(fleet: Fleet) -> None:
    fleet.start("llama", "a").wait_ready()
    environ = os.environ | {"KVTIDE_DIR": str(fleet.ledgers)}
    command = [str(Path(sys.executable).with_name("kvtide")), "census", "a"]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert "DIFFERS" not in said
    assert "model.layers.0" in said
    told = json.loads(
        subprocess.run(
            [*command, "--json"], env=environ, capture_output=True, text=True, check=True
        ).stdout
    )
    assert told["ranks"][0]["unplanned"] is None
    assert not any(line["differs"] for line in told["ranks"][0]["kinds"])


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_the_old_faulty_rule_is_refused_with_the_table(fleet: Fleet, kind: str) -> None:
    fault = {"PROBE_FAULT": "one-layer-per-group"}
    server = fleet.start(kind, "a", "--max-model-len", "1024", environ=fault)
    until(lambda: server.exit_status() is not None, 600, "the start is refused")
    log = server.log.read_text()
    assert server.exit_status() == 1
    assert "Traceback" not in log
    said = log[log.index("kvtide: a would allocate") :]
    assert "Refused: raise the budget" in said
    assert "model.layers.0" in said
    assert "sum" in said
    until(lambda: server.pids() == [], 20, "all processes have ended")
    assert fleet.held_bytes() == 0


def _allocated_kinds(fleet: Fleet) -> set[str]:
    from kvtide.observe.own_figures import read_figures

    figures = read_figures(fleet.instance("a").pools[0].pid)
    assert figures is not None
    return {one.kind for one in figures.allocated}
