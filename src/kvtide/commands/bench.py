"""`kvtide bench`: what can be measured anywhere, each beside its floor."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

__all__ = ["register"]

_Backend = Annotated[str, typer.Option(help="host, or cuda[:N]")]
_Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command to an application."""
    bench = typer.Typer(no_args_is_help=True, help="Measure kvtide here, against the floor.")
    bench.command("growth")(_growth)
    bench.command("blocks")(_blocks)
    bench.command("ledger")(_ledger)
    bench.command("serve")(_serve)
    app.add_typer(bench, name="bench")


def _growth(backend: _Backend = "host", as_json: _Json = False) -> None:
    """Growing and giving back a pool, against the device's raw verbs on the same extents."""
    from kvtide.bench.growth import measure_excess, measure_growth, measure_single
    from kvtide.device import open_device
    from kvtide.units import GIB, MIB

    on_host = backend == "host"
    device = open_device(backend, host_total_bytes=4 * GIB, host_uuid="bench")
    grow_bytes = 256 * MIB if on_host else GIB
    count = 500 if on_host else 10_000
    growth = [
        measure_growth(
            device, layers=layers, block_bytes=2 * MIB, grow_bytes=grow_bytes, repeats=20
        )
        for layers in (1, 32)
    ]
    excess = measure_excess(
        device, block_bytes=2 * MIB, counts=[n for n in (1, 100, 1000, 10_000) if n <= count]
    )
    single = measure_single(device, block_bytes=2 * MIB, blocks=count)
    _show({"growth": growth, "excess": excess, "single": single}, as_json)


def _blocks(as_json: _Json = False) -> None:
    """Allocating and freeing blocks, against vLLM's own pool (needs vLLM)."""
    from kvtide.bench.blocks import measure_blocks
    from kvtide.errors import UnsupportedError

    try:
        import vllm  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "vLLM is not installed beside kvtide here: its pool is what this compares with; run "
            "this in vLLM's environment"
        ) from None
    _show({"blocks": [measure_blocks(caching=caching) for caching in (False, True)]}, as_json)


def _ledger(backend: _Backend = "host", as_json: _Json = False) -> None:
    """A grant and its refund, alone and among eight processes, against the bare lock."""
    from kvtide.bench.ledger import measure_ledger
    from kvtide.device import open_device
    from kvtide.units import GIB

    device = open_device(backend, host_total_bytes=4 * GIB, host_uuid="bench")
    _show({"ledger": measure_ledger(device)}, as_json)


def _serve(
    model: Annotated[
        str, typer.Option(help="Directory of a model; a tiny one is made where none is given.")
    ] = "",
    engine: Annotated[str, typer.Option(help="The engine: vllm.")] = "vllm",
    pairs: Annotated[int, typer.Option(help="Interleaved pairs.")] = 5,
    requests: Annotated[int, typer.Option(help="Requests of one round.")] = 384,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests at a time, closed loop.")] = 16,
    prefix_caching: Annotated[bool, typer.Option(help="Leave the prefix cache on.")] = True,
    as_json: _Json = False,
) -> None:
    """Serve with a native server and one under kvtide, in turns (needs vLLM)."""
    import tempfile
    from pathlib import Path

    from kvtide.bench.serve import measure_serving
    from kvtide.errors import UsageError

    if engine != "vllm":
        raise UsageError(f"--engine {engine}: only vllm can be measured by this command")
    arguments = ["--dtype", "float32", "--max-model-len", "2048"]
    if not prefix_caching:
        arguments.append("--no-enable-prefix-caching")
    with tempfile.TemporaryDirectory() as scratch:
        if model:
            path = Path(model)
        else:
            from kvtide.verify.models import ensure_model

            path = ensure_model("llama", Path(scratch))
        figures = measure_serving(
            path,
            pairs=pairs,
            requests=requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=concurrency,
            arguments=arguments,
            environ={"KVTIDE_HOST_MEMORY": "1GiB"},
            native_environ={"VLLM_CPU_KVCACHE_SPACE": "1"},
            tell=lambda text: typer.echo(text, err=True),
        )
    _show({"serve": {"prefix_caching": prefix_caching, **figures}}, as_json)


def _show(figures: dict[str, Any], as_json: bool) -> None:
    import msgspec

    from kvtide.bench.machine import machine

    figures = {"machine": machine(), **figures}
    encoded = msgspec.json.format(msgspec.json.encode(figures), indent=2)
    if as_json or not sys.stdout.isatty():
        typer.echo(encoded.decode())
        return
    from rich import print as rich_print

    rich_print(figures)
