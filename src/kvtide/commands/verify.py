"""`kvtide verify`: the correctness matrix, against the native engine on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kvtide.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("verify")(verify)


def verify(
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    model: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a model; again for more. Default: tiny ones, made here."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks of each server.")] = 1,
    case: Annotated[
        list[str] | None, typer.Option(help="Only cases like this: 'model/*'; again for more.")
    ] = None,
    backend: Annotated[str, typer.Option(help="host or cuda.")] = "host",
    out: Annotated[Path, typer.Option(help="Directory of the report and logs.")] = Path(
        "verify-out"
    ),
    dtype: Annotated[
        str, typer.Option(help="Of the models named with --model: float32 compares exactly.")
    ] = "float32",
    other: Annotated[
        str | None, typer.Option(help="ENGINE=PYTHON of the other engine, for the mixed pair.")
    ] = None,
    engine_args: Annotated[
        str, typer.Option(help="Further flags of each server, as one text; they win.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Do not run again what held in --out's report.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result as JSON.")] = False,
) -> None:
    """Compare kvtide with the native engine: tokens, cache hits, memory, limits, order of starts.

    Exit 0 only if every check held.
    """
    from kvtide.verify.running import run_verify

    try:
        flags = shlex.split(engine_args)
    except ValueError as error:
        raise UsageError(f"--engine-args {engine_args!r}: {error}") from None
    if not run_verify(
        engine=engine,
        models=model or [],
        tp=tp,
        patterns=case or [],
        backend=backend,
        out=out,
        dtype=dtype,
        other=other,
        as_json=as_json,
        resume=resume,
        flags=flags,
    ):
        raise typer.Exit(1)
