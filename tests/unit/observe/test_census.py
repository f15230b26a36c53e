"""The census: what a worker tells, beside its plan; figures of a GPU from torch and the driver."""

import json
import os
import subprocess
import sys

import pytest

from kvtide.errors import LedgerError
from kvtide.ledger import PoolFigures, PoolView
from kvtide.observe.census import rank_census, take_census
from kvtide.observe.own_figures import (
    Allocated,
    OwnFigures,
    by_kind,
    publish_figures,
    read_figures,
)
from kvtide.sizing.model import read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request
from kvtide.units import GIB, MIB

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
REQUEST = {"tp": 1, "pp": 1, "kv_dtype": "auto", "block_size": 32, "max_model_len": 2048}
POOL = PoolView(
    "0:1", "kv", 0, 77, True, 8 * MIB, 10 * MIB, 2 * MIB, 100, 4096, PoolFigures(1, 1, 0, 1, 0)
)


@pytest.fixture
def figures(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    plan = make_plan(read_model(file, dtype="float32"), Request(**REQUEST), 64 * MIB)
    return OwnFigures(
        engine="vllm",
        version="0.30.0",
        config_file=str(file),
        draft_file=None,
        dtype="float32",
        rank=0,
        request=REQUEST,
        budget_bytes=64 * MIB,
        allocated=tuple(
            Allocated(a.name, a.kind, a.layers, a.count, a.bytes) for a in plan.ranks[0].allocations
        ),
        bytes_by_kind={"weights": 3 * MIB, "context": 600 * MIB},
        planned_bytes={"weights": 3 * MIB},
        source="torch",
    )


def with_bytes(figures, change):
    allocated = [
        Allocated(a.name, a.kind, a.layers, a.count, a.bytes + change(a)) for a in figures.allocated
    ]
    return replace_struct(figures, allocated=tuple(allocated))


def replace_struct(figures, **changes):
    import msgspec

    return msgspec.structs.replace(figures, **changes)


def test_a_rank_that_allocated_its_plan_has_no_line_that_differs(figures):
    rank = rank_census("GPU-1", POOL, figures, None, None)
    assert rank.unplanned is None
    assert [line.name for line in rank.kinds] == ["weights", "kv", "context"]
    assert len(rank.allocations) == 4
    for line in rank.allocations:
        assert line.planned_bytes == line.found_bytes > 15 * MIB
        assert not line.differs
    kinds = {line.name: line for line in rank.kinds}
    assert kinds["context"].planned_bytes is None
    assert not any(line.differs for line in rank.kinds)
    assert (rank.charged_bytes, rank.mapped_bytes, rank.kernel_bytes) == (8 * MIB, 8 * MIB, None)


def test_float32_as_told_by_the_engine_is_twice_the_files_own_rule(figures):
    rank = rank_census("GPU-1", POOL, replace_struct(figures, dtype="bfloat16"), None, None)
    # Twice as many blocks of half the size: the same sum but for one block.
    assert not any(line.differs for line in rank.allocations)
    plan = make_plan(read_model(figures.config_file), Request(**REQUEST), 64 * MIB)
    assert plan.binding.bytes_per_token == 4 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(("by", "differs"), [(0.0099, False), (0.0101, True), (-0.0101, True)])
def test_what_is_off_by_more_than_one_percent_is_marked(figures, by, differs):
    odd = with_bytes(figures, lambda a: int(a.bytes * by) if ".2." in a.name else 0)
    rank = rank_census("GPU-1", POOL, odd, None, None)
    marked = [line.name for line in rank.allocations if line.differs]
    assert marked == (["model.layers.2.self_attn.attn"] if differs else [])


def test_what_the_plan_does_not_have_is_marked(figures):
    extra = Allocated("unlisted call 0", "unlisted", (), 1, 9 * MIB)
    odd = replace_struct(figures, allocated=(*figures.allocated, extra))
    rank = rank_census("GPU-1", POOL, odd, None, None)
    assert [line.name for line in rank.allocations if line.differs] == ["unlisted call 0"]
    missing = replace_struct(figures, allocated=figures.allocated[1:])
    rank = rank_census("GPU-1", POOL, missing, None, None)
    (line,) = [line for line in rank.allocations if line.differs]
    assert line.found_bytes == 0
    assert line.planned_bytes > 0


def test_on_the_host_the_kernel_has_the_last_word(figures):
    rank = rank_census("host", POOL, figures, 8 * MIB, 500 * MIB)
    kinds = {line.name: line.found_bytes for line in rank.kinds}
    assert rank.kernel_bytes == 8 * MIB
    assert kinds["other"] == 497 * MIB


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config_file": None}, "not on this machine"),
        ({"budget_bytes": None}, "a number of blocks was given"),
        ({"budget_bytes": 4096}, "does not fit"),
        ({"config_file": "/no/such/config.json"}, "neither a config.json"),
    ],
)
def test_without_a_plan_it_says_why_and_marks_nothing(figures, changes, says):
    rank = rank_census("GPU-1", POOL, replace_struct(figures, **changes), None, None)
    assert says in rank.unplanned
    assert rank.allocations
    assert not any(line.differs for line in rank.allocations)


def test_a_worker_that_tells_nothing_is_shown_by_the_ledger_alone():
    rank = rank_census("host", POOL, None, 8 * MIB, None)
    assert "tells nothing" in rank.unplanned
    assert rank.source is None
    assert rank.allocations == ()
    assert rank.mapped_bytes == 8 * MIB


def test_a_gpu_is_split_by_torch_and_the_driver():
    split = by_kind(
        reserved_bytes=20 * GIB,
        weights_bytes=15 * GIB,
        graphs_bytes=2 * GIB,
        peak_bytes=GIB,
        process_bytes=30 * GIB,
        mapped_bytes=9 * GIB,
        context_bytes=640 * MIB,
    )
    assert split.source == "torch and the driver"
    assert split.bytes_by_kind == {
        "weights": 15 * GIB,
        "graphs": 2 * GIB,
        "activations": GIB,
        "context": GIB,
        "other": 2 * GIB,
    }
    # All but the KV cache adds up to what the driver counts.
    assert sum(split.bytes_by_kind.values()) == 30 * GIB - 9 * GIB


def test_a_driver_that_tells_nothing_is_said_so():
    split = by_kind(
        reserved_bytes=GIB,
        weights_bytes=GIB,
        graphs_bytes=0,
        peak_bytes=3 * GIB,
        process_bytes=None,
        mapped_bytes=GIB,
        context_bytes=640 * MIB,
    )
    assert "does not tell" in split.source
    assert split.bytes_by_kind["context"] == 640 * MIB
    assert split.bytes_by_kind["activations"] == 0


def test_what_is_told_is_gone_with_the_process_that_told_it(figures, tmp_path):
    descriptor = publish_figures(figures)
    try:
        assert read_figures(os.getpid()) == figures
        later = replace_struct(figures, rank=3)
        second = publish_figures(later)
        assert read_figures(os.getpid()) == later
        os.close(second)
    finally:
        os.close(descriptor)
    assert read_figures(os.getpid()) is None
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    assert read_figures(int(gone.stdout)) is None


def test_an_instance_that_does_not_run_is_an_error(tmp_path):
    with pytest.raises(LedgerError, match="no instance 'chat' runs; there is none at all"):
        take_census(tmp_path / "ledgers", "chat")
