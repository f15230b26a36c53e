"""Run the cases of the matrix one after another, with progress, and keep what was found."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from kvtide.errors import KvtideError
from kvtide.verify.cases import Bench, Case, Skipped

__all__ = [
    "CaseResult",
    "CheckResult",
    "Setup",
    "Verdict",
    "describe_setup",
    "run_matrix",
    "verdict_of",
]

_TAIL_LINES = 25


class CheckResult(msgspec.Struct, frozen=True):
    """One check. `of`: the server, or `both` where two are compared."""

    of: str
    name: str
    held: bool
    found: str


class CaseResult(msgspec.Struct, frozen=True):
    """One case. `state`: ok, failed, skipped, broken (could not be run to its end) or not run."""

    name: str
    state: str
    seconds: float
    checks: tuple[CheckResult, ...] = ()
    reason: str | None = None
    logs: dict[str, str] = {}


class Setup(msgspec.Struct, frozen=True):
    """Where and with what the matrix ran. `flags` of the engine are those that somebody gave."""

    engine: str
    engine_version: str
    kvtide_version: str
    backend: str
    tp: int
    machine: str
    python: str
    models: tuple[str, ...]
    started: str
    flags: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """The whole matrix."""

    ok: bool
    setup: Setup
    seconds: float
    cases: tuple[CaseResult, ...]


def describe_setup(
    engine: str,
    distributions: Sequence[str],
    backend: str,
    tp: int,
    models: Sequence[str],
    flags: Sequence[str] = (),
) -> Setup:
    """What a reader must know to weigh the results."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return Setup(
        engine=engine,
        engine_version=next((v for d in distributions if (v := _version(d))), "not installed here"),
        kvtide_version=_version("kvtide") or "not installed",
        backend=backend,
        tp=tp,
        machine=f"{platform.machine()}, {cores} cores, {memory:.0f} GiB, {platform.release()}",
        python=platform.python_version(),
        models=tuple(models),
        started=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        flags=tuple(flags),
    )


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return None


def run_matrix(
    cases: Sequence[Case],
    setup: Setup,
    bench: Callable[[str, Callable[[str], None]], Bench],
    say: Callable[[str], None],
    done: Callable[[CaseResult], None] = lambda _: None,
    known: Mapping[str, CaseResult] | None = None,
) -> Verdict:
    """Run them in order. One that fails or breaks does not keep the others from running.

    Parameters
    ----------
    bench
        Gives a case, by its name, its directories and servers.
    say
        Called with each step of the case that runs.
    done
        Called with each case's result.
    known
        Results of cases that need not run again, by name.
    """
    results = dict(known or {})
    for number, case in enumerate(cases, 1):
        if case.name not in results:
            title = f"[{number}/{len(cases)}] {case.name}"
            results[case.name] = _run(case, bench(case.name, partial(_say, say, title)))
            done(results[case.name])
    return verdict_of(cases, setup, results)


def verdict_of(cases: Sequence[Case], setup: Setup, results: Mapping[str, CaseResult]) -> Verdict:
    """The matrix as far as it has results, by the cases' names."""
    found = tuple(results.get(c.name) or CaseResult(c.name, "not run", 0.0) for c in cases)
    ok = bool(found) and all(result.state in ("ok", "skipped") for result in found)
    return Verdict(ok, setup, round(sum(result.seconds for result in found), 1), found)


def _say(say: Callable[[str], None], title: str, step: str) -> None:
    say(f"{title}: {step}")


def _run(case: Case, bench: Bench) -> CaseResult:
    began = time.monotonic()
    checks: tuple[CheckResult, ...] = ()
    reason, state = None, "ok"
    try:
        seen = case.run(bench)
        checks = tuple(CheckResult(of, c.title, c.held, c.found) for of, c in seen.checks)
        if not all(check.held for check in checks):
            state = "failed"
    except Skipped as why:
        state, reason = "skipped", str(why)
    except (KvtideError, OSError) as error:
        state, reason = "broken", f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(bench.work, ignore_errors=True)
    logs = _tails(bench.logs) if state in ("failed", "broken") else {}
    seconds = round(time.monotonic() - began, 1)
    return CaseResult(case.name, state, seconds, checks, reason, logs)


def _tails(directory: Path) -> dict[str, str]:
    """The end of each log of a case, by its name."""
    return {
        log.name: "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        for log in sorted(directory.glob("*.log"))
    }
