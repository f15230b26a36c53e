"""A plan, or the refusal of one, as JSON that stays stable and as text for people."""

from __future__ import annotations

from typing import Any

from kvtide.sizing.errors import DoesNotFitError
from kvtide.sizing.plan import Plan, RankPlan
from kvtide.sizing.table import allocation_table, columns
from kvtide.units import format_gib, format_size

__all__ = ["plan_json", "plan_text", "refusal_json"]


def _rank_json(plan: Plan, rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "tp_rank": rank.tp_rank,
        "pp_rank": rank.pp_rank,
        "block_size": plan.block_size,
        "num_blocks": rank.num_blocks,
        "num_tokens": rank.num_tokens,
        "blocks_that_fit": rank.blocks_that_fit,
        "bytes_per_token": rank.bytes_per_token,
        "bytes_per_block": rank.bytes_per_block,
        "max_concurrency": plan.max_concurrency,
        "budget_bytes": plan.budget_bytes,
        "allocated_bytes": rank.allocated_bytes,
        "allocations": [
            {
                "name": allocation.name,
                "kind": allocation.kind,
                "layers": list(allocation.layers),
                "count": allocation.count,
                "bytes": allocation.bytes,
            }
            for allocation in rank.allocations
        ],
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data: the figures are the binding rank's, `ranks` has all of them."""
    ranks = [_rank_json(plan, rank) for rank in plan.ranks]
    binding = ranks[plan.binding_rank]
    return {
        "engine": plan.engine,
        "model": plan.model.name,
        "model_type": plan.model.model_type,
        "kv_dtype": plan.kv_dtype,
        "max_model_len": plan.max_model_len,
        **{key: binding[key] for key in _SAME_AS_BINDING},
        "engine_tokens": plan.engine_tokens,
        "smallest_budget_bytes": plan.smallest_budget_bytes,
        "allocations": binding["allocations"],
        "binding_rank": plan.binding_rank,
        "ranks": ranks,
        "notes": list(plan.notes),
    }


_SAME_AS_BINDING = (
    "block_size",
    "num_blocks",
    "num_tokens",
    "bytes_per_token",
    "bytes_per_block",
    "max_concurrency",
    "budget_bytes",
    "allocated_bytes",
)


def refusal_json(error: DoesNotFitError) -> dict[str, Any]:
    """The refusal as plain data."""
    return {
        "error": str(error),
        "smallest_budget_bytes": error.smallest_budget_bytes,
        "longest_max_model_len": error.longest_max_model_len,
        "num_blocks": error.num_blocks,
        "max_concurrency": error.max_concurrency,
    }


def plan_text(plan: Plan) -> str:
    """The plan for people: the figures, what is allocated, and what binds."""
    rank = plan.binding
    split = f"tp {plan.request.tp}, pp {plan.request.pp}"
    head = [
        ("model", f"{plan.model.name} ({plan.model.model_type}), KV in {plan.kv_dtype}"),
        ("engine", f"{plan.engine}, {split}, max-model-len {plan.max_model_len}"),
        ("budget", f"{format_gib(plan.budget_bytes)} GiB a rank"),
        (
            "cache",
            f"{plan.num_blocks} blocks of {plan.block_size}, {plan.num_tokens} tokens, "
            f"{plan.max_concurrency:.2f} sequences of {plan.max_model_len}",
        ),
        (
            "a token",
            f"{rank.bytes_per_token} bytes; a block {format_size(rank.bytes_per_block)}",
        ),
        ("smallest", f"{plan.smallest_budget_bytes} bytes is the smallest budget that works"),
        ("binds", _binds(plan)),
    ]
    if plan.engine_tokens != plan.num_tokens:
        head.insert(
            4, ("", f"{plan.engine} itself prints {plan.engine_tokens} tokens: it pads beyond them")
        )
    parts = [columns(head), allocation_table(rank.allocations)]
    if plan.notes:
        parts.append("\n".join(f"note: {note}" for note in plan.notes))
    return "\n\n".join(parts)


def _binds(plan: Plan) -> str:
    rank = plan.binding
    left = plan.budget_bytes - rank.allocated_bytes
    if plan.request.pp == 1:
        ranks = "the budget, on every rank alike" if len(plan.ranks) > 1 else "the budget"
        return f"{ranks}: {format_gib(left)} GiB are left of it"
    fitting = {r.pp_rank: r.blocks_that_fit for r in plan.ranks}
    others = ", ".join(
        f"stage {stage} alone could hold {blocks}"
        for stage, blocks in fitting.items()
        if blocks > plan.num_blocks
    )
    return f"rank {rank.rank} (stage {rank.pp_rank})" + (f"; {others}" if others else "")
