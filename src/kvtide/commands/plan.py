"""`kvtide plan`: how many tokens a model gets from some memory, and what is allocated for them."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kvtide.errors import UsageError
from kvtide.sizing.capacity import vllm_capacity
from kvtide.sizing.errors import DoesNotFitError
from kvtide.sizing.model import read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.report import plan_json, plan_text, refusal_json
from kvtide.sizing.request import Request
from kvtide.units import format_size, parse_size

__all__ = ["register"]

_UTILIZATION = {"vllm": 0.92, "sglang": 0.9}


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("plan")(plan)


def _budget(
    engine: str,
    kv_memory: str | None,
    device_memory: str | None,
    utilization: float | None,
    weights: str | None,
    non_kv: str | None,
) -> tuple[int, int | None]:
    """KV bytes of a rank, and the device's memory where that was given."""
    if (kv_memory is None) == (device_memory is None):
        raise UsageError("give either --kv-memory SIZE or --device-memory SIZE")
    if kv_memory is not None:
        if utilization is not None or weights is not None or non_kv is not None:
            raise UsageError("--utilization, --weights and --non-kv go with --device-memory")
        return parse_size(kv_memory), None
    assert device_memory is not None
    total = parse_size(device_memory)
    fraction = _UTILIZATION.get(engine, 1.0) if utilization is None else utilization
    # SGLang's own capacity takes nothing off; what is named here is taken off all the same.
    budget = vllm_capacity(
        total,
        fraction,
        weights_bytes=parse_size(weights or "0"),
        torch_peak_bytes=parse_size(non_kv or "0"),
    )
    if not budget:
        raise UsageError(
            f"weights and non-KV memory leave nothing of the {fraction} of {format_size(total)} "
            "that the engine may take"
        )
    return budget, total


def plan(
    model: Annotated[str, typer.Argument(help="A config.json, or a folder that holds one.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or fp8.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step.")] = None,
    speculative_tokens: Annotated[int, typer.Option(help="Tokens drafted a step.")] = 0,
    draft: Annotated[str | None, typer.Option(help="The draft model's config.json.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV memory of a rank: 12GiB.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="A device's memory: 80GiB.")] = None,
    utilization: Annotated[float | None, typer.Option(help="The engine's share of it.")] = None,
    weights: Annotated[str | None, typer.Option(help="Weights of a rank: 15GiB.")] = None,
    non_kv: Annotated[str | None, typer.Option(help="Activations of a rank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Plan a KV cache: tokens, blocks and every allocation, before there is a GPU."""
    request = Request(
        engine=engine,
        tp=tp,
        pp=pp,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        speculative_tokens=speculative_tokens,
        draft=None if draft is None else read_model(draft),
    )
    budget, total = _budget(engine, kv_memory, device_memory, utilization, weights, non_kv)
    found = read_model(model)
    try:
        made = make_plan(found, request, budget, device_bytes=total)
    except DoesNotFitError as error:
        if not as_json:
            raise
        typer.echo(msgspec.json.encode(refusal_json(error)).decode())
        raise typer.Exit(error.exit_status) from None
    typer.echo(
        msgspec.json.format(msgspec.json.encode(plan_json(made)), indent=2).decode()
        if as_json
        else plan_text(made)
    )
