"""One run of the matrix as a person asks for it: models, directories, progress, the report."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from kvtide.errors import UnsupportedError, UsageError
from kvtide.sizing.fields import RUN_DTYPES
from kvtide.verify.cases import Bench, make_cases, select
from kvtide.verify.engines import find_engine
from kvtide.verify.matrix import CaseResult, Setup, Verdict, describe_setup, run_matrix, verdict_of
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.private import private_directory
from kvtide.verify.report import REPORT, write_report
from kvtide.verify.servers import Server
from kvtide.verify.site import Model

__all__ = ["TINY", "run_verify"]

# Of every kind of cache: full, grouped, windows, latent, states beside attention, states alone.
TINY = ("llama", "qwen2", "gemma3", "deepseek", "qwen3next", "gptoss", "mamba2")
WIDE = "llama-wide"
_STATES = {"ok": "[green]ok[/]", "skipped": "[dim]skipped[/]"}


def run_verify(
    *,
    engine: str,
    models: Sequence[Path],
    tp: int,
    patterns: Sequence[str],
    backend: str,
    out: Path,
    dtype: str,
    other: str | None,
    as_json: bool,
    resume: bool = False,
    flags: Sequence[str] = (),
    extra: dict[str, str] | None = None,
) -> bool:
    """Run it and write the report into `out` after each case; whether every check held.

    With `resume`, cases of the report that lies there, with the same engine and kvtide on the same
    machine, are taken over from it: those that held, and all that `patterns` do not choose, which
    may have failed or been skipped. `flags` are the engine's own, for each of its servers, `extra`
    further variables of all.

    Raises
    ------
    UsageError
        The engine or the backend is not known, or a pattern matches nothing.
    UnsupportedError
        This Python does not have the engine.
    """
    if backend not in ("host", "cuda"):
        raise UsageError(f"backend {backend!r} is not host or cuda")
    if tp < 1:
        raise UsageError(f"--tp {tp}: a server has at least one rank")
    if dtype not in RUN_DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not one of {', '.join(RUN_DTYPES)}")
    for path in models:
        if not (path / "config.json").is_file():
            raise UsageError(f"--model {path}: there is no config.json in it")
    kind, second = find_engine(engine, backend), _other(other, backend)
    if importlib.util.find_spec(kind.engine) is None:
        raise UnsupportedError(
            f"verify starts {engine}, which this Python environment does not have: run it with "
            "the kvtide of the environment that has it"
        )
    console = Console(stderr=as_json, highlight=False)
    with private_directory("kvtide-verify-") as work:
        tiny = [Model(k, work / "models" / k, dtype_of(k, backend)) for k in (*TINY, WIDE)]
        chosen = [Model(p.name, p.resolve(), dtype) for p in models] or tiny[:-1]
        lacks = {} if models or backend != "host" else kind.lacks
        every = make_cases(chosen, chosen[0] if models else tiny[-1], backend, lacks)
        wanted = select(every, patterns)
        for pattern in patterns:
            if not select(every, [pattern]):
                names = ", ".join(case.name for case in every)
                raise UsageError(f"no case is like {pattern!r}; there are {names}")
        called = [model.name for model in chosen]
        setup = describe_setup(engine, kind.distributions, backend, tp, called, flags)
        known = _taken_over(out, setup, [case.name for case in wanted]) if resume else {}
        cases = [case for case in every if case in wanted or case.name in known]
        parts = {part for c in cases if c.name not in known for part in c.name.split("/")}
        if not models:
            _make_tiny([m for m in tiny if m.name in parts and m.name not in lacks], work)
        results = dict(known)
        console.print(f"{len(cases)} cases with {setup.engine_version}", style="bold")

        def bench(name: str, say: Callable[[str], None]) -> Bench:
            slug = name.replace("/", "-")
            logs = out / "logs" / slug
            shutil.rmtree(logs, ignore_errors=True)
            return Bench(
                kind=kind,
                backend=backend,
                tp=tp,
                work=work / slug,
                logs=logs,
                say=say,
                other=second,
                extra=extra,
                flags=tuple(flags),
            )

        def done(result: CaseResult) -> None:
            results[result.name] = result
            write_report(verdict_of(cases, setup, results), out)  # what is ended early has one too
            word = _STATES.get(result.state, f"[bold red]{result.state}[/]")
            held = sum(check.held for check in result.checks)
            console.print(
                f"  {word}  {escape(result.name)}: {held} of {len(result.checks)} checks, "
                f"{result.seconds:.0f} s  {escape(result.reason or '')}"
            )
            for check in result.checks:
                if not check.held:
                    console.print(f"      [red]{check.name}[/] ({check.of}): {escape(check.found)}")

        def say(text: str) -> None:
            console.print(f"[dim]{escape(text)}[/]")

        verdict = run_matrix(cases, setup, bench, say, done, known)
    written = write_report(verdict, out)
    console.print("see " + ", ".join(str(path) for path in written))
    if as_json:
        print(msgspec.json.encode(verdict).decode())
    return verdict.ok


def _other(text: str | None, backend: str) -> tuple[type[Server], str] | None:
    if text is None:
        return None
    name, equals, python = text.partition("=")
    if not equals or not Path(python).is_file():
        raise UsageError(f"--other {text!r}: write ENGINE=PYTHON, with the path of its Python")
    return find_engine(name, backend), python


def _taken_over(out: Path, setup: Setup, wanted: Sequence[str]) -> dict[str, CaseResult]:
    """What need not run again of an earlier report under the same conditions.

    A case that is not wanted now keeps its result whatever it is: a report that lost its failures
    would say that every check held.
    """
    try:
        earlier = msgspec.json.decode((out / REPORT).read_bytes(), type=Verdict)
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    was, now = (msgspec.structs.replace(s, started="", models=()) for s in (earlier.setup, setup))
    if was != now:
        return {}
    return {
        case.name: case
        for case in earlier.cases
        if case.state == "ok" or (case.state != "not run" and case.name not in wanted)
    }


def _make_tiny(models: Sequence[Model], work: Path) -> None:
    """Make them where they are expected."""
    for model in models:
        made = ensure_model(model.name, work / "made", dtype=model.dtype)
        model.path.parent.mkdir(parents=True, exist_ok=True)
        made.rename(model.path)
