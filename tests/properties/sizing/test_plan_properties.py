"""Properties of plans over random architectures, budgets and parallel splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtide.sizing.errors import ConfigError, DoesNotFitError
from kvtide.sizing.layers import Attention, Kind, Layer, State
from kvtide.sizing.model import Model
from kvtide.sizing.plan import Plan, make_plan
from kvtide.sizing.request import Request
from kvtide.units import GIB, MIB

PROPERTY = settings(max_examples=60, deadline=None, print_blob=True)
DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])


@st.composite
def geometries(draw: st.DrawFn) -> Layer:
    """One kind of layer; its name and index come later."""
    kind = draw(st.sampled_from(list(Kind)))
    if kind in (Kind.MLA, Kind.INDEXER):
        width = draw(st.sampled_from([64, 132, 576]))
        fixed = width if kind is Kind.INDEXER else None
        return Attention("", 0, kind, 1, width, 0, replicated=True, token_bytes_fixed=fixed)
    if kind in (Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.CROSS):
        dim = draw(st.sampled_from([32, 64, 80, 128, 256]))
        windowed = kind in (Kind.SLIDING, Kind.CHUNKED)
        window = draw(st.integers(1, 5000)) if windowed else None
        return Attention("", 0, kind, draw(st.sampled_from([1, 2, 4, 8])), dim, dim, window=window)
    return State(
        "",
        0,
        kind,
        conv_columns=draw(st.sampled_from([0, 64, 1024])),
        conv_kernel=draw(st.integers(1, 5)),
        heads=draw(st.sampled_from([8, 16])),
        head_elements=draw(st.integers(1, 20000)),
        conv_dtype=draw(DTYPES),
        state_dtype=draw(DTYPES),
        conv_groups=draw(st.sampled_from([0, 1, 8])),
        conv_group_columns=draw(st.sampled_from([0, 128])),
        conv_grows=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    kinds = draw(st.lists(geometries(), min_size=1, max_size=3))
    pattern = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=12))
    layers = tuple(
        replace(kinds[choice], name=f"layers.{i}", index=i) for i, choice in enumerate(pattern)
    )
    drafts = tuple(
        replace(layer, name=f"mtp.{layer.name}", draft=True)
        for layer in layers[-1:]
        if isinstance(layer, Attention)
    )
    return Model(
        name="random",
        file="config.json",
        model_type=draw(st.sampled_from(["llama", "gpt_oss"])),
        architectures=(),
        layers=layers,
        shared=(),
        num_layers=len(layers),
        encoder_layers=0,
        own_drafts=drafts if draw(st.booleans()) else (),
        dtype="bfloat16",
        weights_kv_dtype=None,
        ssm_dtype=None,
        max_model_len=None,
        assumed=(),
    )


@st.composite
def requests(draw: st.DrawFn, layers: int) -> Request:
    return Request(
        engine=draw(st.sampled_from(["vllm", "sglang"])),
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        pp=draw(st.integers(1, min(4, layers))),
        kv_dtype=draw(st.sampled_from(["auto", "fp8"])),
        block_size=draw(st.sampled_from([None, 1, 16, 32, 48])),
        max_model_len=draw(st.integers(1, 20000)),
        max_num_seqs=draw(st.integers(1, 300)),
        max_num_batched_tokens=draw(st.sampled_from([None, 512, 8192])),
        speculative_tokens=draw(st.integers(0, 4)),
        prefix_caching=draw(st.booleans()),
        block_outermost=draw(st.booleans()),
        platform=draw(st.sampled_from(["cuda", "cpu"])),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Request]:
    model = draw(models())
    return model, draw(requests(model.num_layers))


BUDGETS = st.integers(0, 64 * MIB) | st.integers(0, 40 * GIB)
EXTRA = st.integers(0, 4 * MIB) | st.integers(0, 40 * GIB)


def planned(model: Model, request: Request, budget: int) -> Plan | DoesNotFitError | None:
    """A plan, its refusal, or None for a model that the engine itself could not run so."""
    try:
        return make_plan(model, request, budget)
    except DoesNotFitError as refusal:
        return refusal
    except ConfigError:
        return None


def fitting(pair: tuple[Model, Request], extra_bytes: int) -> Plan:
    """A plan with some bytes more than it needs."""
    plenty = planned(*pair, 1 << 50)
    assume(plenty is not None)
    assert isinstance(plenty, Plan)
    return make_plan(*pair, plenty.smallest_budget_bytes + extra_bytes)


def assert_bounded(plan: Plan) -> None:
    """Every rank's listed allocations are its sum, and that is at most the budget."""
    for rank in plan.ranks:
        assert sum(a.bytes for a in rank.allocations) == rank.allocated_bytes
        assert rank.allocated_bytes <= plan.budget_bytes
        assert rank.num_blocks <= rank.blocks_that_fit
    assert plan.smallest_budget_bytes <= plan.budget_bytes


@PROPERTY
@given(pairs(), BUDGETS)
def test_the_sum_is_bounded_or_the_refusal_is_exact(pair, budget):
    model, request = pair
    plan = planned(model, request, budget)
    assume(plan is not None)
    if isinstance(plan, Plan):
        assert_bounded(plan)
        return
    smallest = plan.smallest_budget_bytes
    assert smallest > budget
    assert_bounded(make_plan(model, request, smallest))
    with pytest.raises(DoesNotFitError):
        make_plan(model, request, smallest - 1)
    longest = plan.longest_max_model_len
    assert longest < request.max_model_len
    if longest:
        assert_bounded(make_plan(model, replace(request, max_model_len=longest), budget))
    with pytest.raises(DoesNotFitError):
        make_plan(model, replace(request, max_model_len=longest + 1), budget)


@PROPERTY
@given(pairs(), EXTRA, st.integers(1, 64 * MIB))
def test_more_memory_never_gives_fewer_blocks(pair, extra, more):
    less = fitting(pair, extra)
    plenty = make_plan(*pair, less.budget_bytes + more)
    assert_bounded(plenty)
    assert plenty.num_blocks >= less.num_blocks
    assert plenty.num_tokens >= less.num_tokens


@PROPERTY
@given(pairs(), BUDGETS, st.integers(1, 20000))
def test_a_longer_context_never_fits_where_a_shorter_one_does_not(pair, budget, more):
    model, request = pair
    short = planned(model, request, budget)
    assume(isinstance(short, DoesNotFitError))
    longer = replace(request, max_model_len=request.max_model_len + more)
    assert isinstance(planned(model, longer, budget), DoesNotFitError)


@PROPERTY
@given(pairs(), EXTRA)
def test_tensor_parallel_ranks_of_a_stage_are_equal(pair, extra):
    plan = fitting(pair, extra)
    request = plan.request
    assert len(plan.ranks) == request.tp * request.pp
    for stage in range(request.pp):
        ranks = [rank for rank in plan.ranks if rank.pp_rank == stage]
        assert {replace(rank, rank=0, tp_rank=0) for rank in ranks} == {
            replace(ranks[0], rank=0, tp_rank=0)
        }
    assert len({rank.num_blocks for rank in plan.ranks}) == 1
    assert plan.binding.blocks_that_fit == min(rank.blocks_that_fit for rank in plan.ranks)


@PROPERTY
@given(pairs(), EXTRA)
def test_every_layer_is_in_the_allocations_of_exactly_one_stage(pair, extra):
    plan = fitting(pair, extra)
    model = plan.model
    drafts = model.own_drafts if plan.request.speculative_tokens else ()
    stages = [rank for rank in plan.ranks if rank.tp_rank == 0]
    named = [{name for a in rank.allocations for name in a.layers} for rank in stages]
    assert sum(len(names) for names in named) == len(set().union(*named))
    assert set().union(*named) == {layer.name for layer in (*model.layers, *drafts)}
