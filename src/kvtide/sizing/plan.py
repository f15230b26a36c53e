"""The plan: as many blocks as a budget holds on the rank that binds, and what they allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from kvtide.sizing.errors import ConfigError, DoesNotFitError
from kvtide.sizing.layers import DTYPE_BYTES
from kvtide.sizing.model import Model
from kvtide.sizing.request import Request
from kvtide.sizing.rows import UNBOUNDED, Allocation, Row, allocations, invert, total_bytes
from kvtide.sizing.rules import RULES
from kvtide.units import format_size

__all__ = ["Plan", "RankPlan", "make_plan"]


class Rule(Protocol):
    """What a plan asks of an engine's rule; `stage` is a pipeline stage."""

    @property
    def block_size(self) -> int: ...
    @property
    def required_blocks(self) -> int: ...
    @property
    def notes(self) -> list[str]: ...
    def rows(self, stage: int, budget_bytes: int) -> list[Row]: ...
    def usable(self, budget_bytes: int) -> bool: ...
    def concurrency(self, blocks: int) -> float: ...
    def tokens(self, blocks: int) -> int: ...
    def token_bytes(self, stage: int) -> int: ...
    def engine_tokens(self, stage: int, budget_bytes: int, blocks: int) -> int: ...


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: `blocks_that_fit` alone, before the smallest of all ranks holds for each."""

    rank: int
    tp_rank: int
    pp_rank: int
    blocks_that_fit: int
    num_blocks: int
    num_tokens: int
    bytes_per_token: int
    bytes_per_block: int
    allocated_bytes: int
    allocations: tuple[Allocation, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan whose allocations sum to at most the budget, on every rank.

    `smallest_budget_bytes`: the least with which the same request is a plan.
    `engine_tokens`: what the engine prints for this budget; more than `num_tokens` where it does
    not count what it pads with.
    """

    engine: str
    model: Model
    request: Request
    kv_dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    num_tokens: int
    engine_tokens: int
    max_concurrency: float
    budget_bytes: int
    smallest_budget_bytes: int
    binding_rank: int
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]

    @property
    def binding(self) -> RankPlan:
        """The rank whose figures are the plan's."""
        return self.ranks[self.binding_rank]


def make_plan(
    model: Model, request: Request, budget_bytes: int, *, device_bytes: int | None = None
) -> Plan:
    """Plan a KV cache of at most `budget_bytes` on each rank.

    Parameters
    ----------
    device_bytes
        The device's memory, where known: engines choose defaults by it.

    Raises
    ------
    DoesNotFitError
        One sequence of `max_model_len` with its states does not fit.
    ConfigError
        The model cannot be split so, or a length is missing.
    """
    _check(model, request)
    kv_dtype = _kv_dtype(model, request)
    length = request.max_model_len or model.max_model_len
    if length is None:
        raise ConfigError(
            f"{model.file} does not say how many tokens the model was made for: give max-model-len"
        )

    def ruled(max_model_len: int) -> Rule:
        rule: Rule = RULES[request.engine](model, request, kv_dtype, max_model_len, device_bytes)
        return rule

    rule = ruled(length)
    fitting = _fitting(rule, request.pp, budget_bytes)
    blocks = min(fitting)
    if blocks < rule.required_blocks or not rule.usable(budget_bytes):
        raise _refusal(model, request, budget_bytes, length, ruled)
    if blocks == UNBOUNDED:  # nothing grows with tokens: one sequence's worth is all there is
        blocks = rule.required_blocks
    stage = fitting.index(min(fitting))
    ranks = tuple(_ranks(rule, request, budget_bytes, fitting, blocks))
    for rank in ranks:
        assert rank.allocated_bytes <= budget_bytes, (rank, budget_bytes)
    return Plan(
        engine=request.engine,
        model=model,
        request=request,
        kv_dtype=kv_dtype,
        max_model_len=length,
        block_size=rule.block_size,
        num_blocks=blocks,
        num_tokens=rule.tokens(blocks),
        engine_tokens=_engine_tokens(rule, stage, budget_bytes, blocks),
        max_concurrency=rule.concurrency(blocks),
        budget_bytes=budget_bytes,
        smallest_budget_bytes=_smallest_budget(rule, request.pp),
        binding_rank=stage * request.tp,
        ranks=ranks,
        notes=tuple(_notes(rule, model, request, kv_dtype)),
    )


def _engine_tokens(rule: Rule, stage: int, budget_bytes: int, blocks: int) -> int:
    found = rule.engine_tokens(stage, budget_bytes, blocks)
    return rule.tokens(blocks) if found >= UNBOUNDED else found


def _check(model: Model, request: Request) -> None:
    absent = RULES[request.engine].absent
    if model.model_type in absent:
        raise ConfigError(f"{model.file}: {model.model_type}: {absent[model.model_type]}")
    if request.pp > model.num_layers:
        raise ConfigError(
            f"{model.name} has {model.num_layers} layers: they cannot be split over "
            f"{request.pp} pipeline stages"
        )


def _kv_dtype(model: Model, request: Request) -> str:
    """The dtype of K and V: as told, else what the weights ask for, else the model's."""
    if request.kv_dtype != "auto":
        return request.kv_dtype
    if model.weights_kv_dtype is None:
        return model.dtype
    if model.weights_kv_dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"{model.file}: the quantised weights ask for a KV cache of "
            f"{model.weights_kv_dtype!r}, which the planner cannot size; name a dtype with "
            "--kv-dtype"
        )
    return model.weights_kv_dtype


def _fitting(rule: Rule, pp: int, budget_bytes: int) -> list[int]:
    return [invert(rule.rows(stage, budget_bytes), budget_bytes) for stage in range(pp)]


def _fits(rule: Rule, pp: int, budget_bytes: int) -> bool:
    return rule.usable(budget_bytes) and all(
        blocks >= rule.required_blocks for blocks in _fitting(rule, pp, budget_bytes)
    )


def _smallest_budget(rule: Rule, pp: int) -> int:
    """The least budget with which the rule has a plan, by asking it."""
    low = max(total_bytes(rule.rows(s, 0), rule.required_blocks) for s in range(pp))
    if _fits(rule, pp, low):
        return low
    return _first(lambda budget: _fits(rule, pp, budget), low)


def _first(holds: Callable[[int], bool], fails_at: int) -> int:
    """The least number above `fails_at` for which `holds`, which never turns false again."""
    step = 1 << 20
    while not holds(fails_at + step):
        fails_at += step
        step *= 2
    fails, works = fails_at, fails_at + step
    while works - fails > 1:
        middle = (fails + works) // 2
        if holds(middle):
            works = middle
        else:
            fails = middle
    return works


def _longest(request: Request, budget: int, length: int, ruled: Callable[[int], Rule]) -> int:
    """The largest max_model_len below `length` with which this budget is a plan; 0 if none."""
    fits, too_long = 0, length
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _fits(ruled(middle), request.pp, budget):
            fits = middle
        else:
            too_long = middle
    return fits


def _refusal(
    model: Model, request: Request, budget: int, length: int, ruled: Callable[[int], Rule]
) -> DoesNotFitError:
    rule = ruled(length)
    smallest = _smallest_budget(rule, request.pp)
    longest = _longest(request, budget, length, ruled)
    blocks = max(0, min(_fitting(rule, request.pp, budget)))
    way_out = (
        f"or take max-model-len {longest}, the longest that fits"
        if longest
        else "with this budget not even a max-model-len of 1 fits"
    )
    return DoesNotFitError(
        f"{model.name} on {request.engine} with max-model-len {length} does not fit: one sequence "
        f"with its states needs {smallest} bytes ({format_size(smallest)}) on a rank and the "
        f"budget is {budget} bytes ({format_size(budget)}). Give {smallest} bytes, the smallest "
        f"budget that works, {way_out}",
        smallest_budget_bytes=smallest,
        longest_max_model_len=longest,
        num_blocks=blocks,
        max_concurrency=rule.concurrency(blocks),
    )


def _ranks(
    rule: Rule, request: Request, budget: int, fitting: list[int], blocks: int
) -> Iterable[RankPlan]:
    for stage in range(request.pp):
        rows = rule.rows(stage, budget)
        first = RankPlan(
            rank=stage * request.tp,
            tp_rank=0,
            pp_rank=stage,
            blocks_that_fit=blocks if fitting[stage] == UNBOUNDED else fitting[stage],
            num_blocks=blocks,
            num_tokens=rule.tokens(blocks),
            bytes_per_token=rule.token_bytes(stage),
            # Exact where every block adds the same, cut to whole bytes where a ratio is at work.
            bytes_per_block=(total_bytes(rows, UNBOUNDED) - total_bytes(rows, 0)) // UNBOUNDED,
            allocated_bytes=total_bytes(rows, blocks),
            allocations=allocations(rows, blocks),
        )
        for tp_rank in range(request.tp):
            yield replace(first, rank=first.rank + tp_rank, tp_rank=tp_rank)


def _notes(rule: Rule, model: Model, request: Request, kv_dtype: str) -> list[str]:
    notes = [*model.assumed, *rule.notes]
    if request.kv_dtype == "auto" and model.weights_kv_dtype:
        notes.insert(0, f"the quantised weights ask for a KV cache in {kv_dtype}")
    if request.speculative_tokens and request.draft is None and not model.own_drafts:
        notes.append("no draft model and no draft layers of its own: drafting keeps no KV")
    if model.shared:
        notes.append(
            f"{len(model.shared)} layers read the KV of others, from {model.shared[0].name} on"
        )
    return notes
