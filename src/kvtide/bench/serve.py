"""Serving: a native server and one under kvtide in turns, on one machine, closed and open loop."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide.bench.machine import cpu_seconds
from kvtide.bench.pairs import paired_ratios
from kvtide.bench.stream import Timing, closed_loop, open_loop
from kvtide.verify.client import random_prompts
from kvtide.verify.servers import Server

__all__ = ["measure_serving"]

_MODEL = "m"
_SATURATION_SHARE = 0.8


def measure_serving(
    model: Path,
    *,
    pairs: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    arguments: Sequence[str],
    environ: dict[str, str],
    native_environ: dict[str, str],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Tokens a second and latencies of both, in interleaved pairs.

    Both servers stay up; every pair has prompts of its own and swaps who goes first. The open loop
    arrives at 80% of the native one's closed-loop rate.

    Returns
    -------
    dict
        For each system the figures of every round, tokens a second and seconds of processor time
        of all its processes, and the ratios' median, least and most. The second holds also where
        other work of the machine spoils the first.
    """
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ledgers = Path(tempfile.mkdtemp(prefix="kvtide-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, ledgers, ignore_errors=True)
        elastic = {
            "KVTIDE": "1",
            "KVTIDE_DIR": str(ledgers),
            "KVTIDE_HOST_DEVICE": ledgers.name,
            **environ,
        }
        flags = ["--served-model-name", _MODEL, *arguments]
        servers = {}
        for name, extra in (("native", native_environ), ("kvtide", elastic)):
            tell(f"starting the {name} server")
            server = Server(model, log=work / f"{name}.log", arguments=flags, environ=extra)
            servers[name] = stack.enter_context(server).wait_ready()
        urls = {name: server.url for name, server in servers.items()}

        def prompts(seed: int) -> list[list[int]]:
            return random_prompts(seed, requests, prompt_tokens)

        for url in urls.values():
            closed_loop(url, _MODEL, prompts(10_000)[:concurrency], output_tokens, concurrency)
        closed: dict[str, list[float]] = {name: [] for name in servers}
        worked: dict[str, list[float]] = {name: [] for name in servers}
        for round_ in range(pairs):
            tell(f"closed loop, pair {round_ + 1} of {pairs}")
            for name in _order(urls, round_):
                before = cpu_seconds(servers[name].pids())
                seconds, timings = closed_loop(
                    urls[name], _MODEL, prompts(round_), output_tokens, concurrency
                )
                _check(timings)
                closed[name].append(requests * output_tokens / seconds)
                worked[name].append(cpu_seconds(servers[name].pids()) - before)
        rate = _SATURATION_SHARE * statistics.median(closed["native"]) / output_tokens
        opened: dict[str, list[Timing]] = {name: [] for name in servers}
        for round_ in range(pairs):
            tell(f"open loop at {rate:.2f} requests a second, pair {round_ + 1} of {pairs}")
            for name in _order(urls, round_):
                seed = 100 + round_
                timings = open_loop(urls[name], _MODEL, prompts(seed), output_tokens, rate, seed)
                _check(timings)
                opened[name] += timings
    return {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "concurrency": concurrency,
        "arguments": list(arguments),
        "tokens_per_s": {name: [round(v, 1) for v in rates] for name, rates in closed.items()},
        "ratio": paired_ratios(closed["kvtide"], closed["native"]),
        "cpu_seconds": {name: [round(v, 2) for v in took] for name, took in worked.items()},
        "cpu_ratio": paired_ratios(worked["kvtide"], worked["native"]),
        "open_loop_rate": round(rate, 3),
        "open_loop": {name: _latencies(timings) for name, timings in opened.items()},
    }


def _order(servers: dict[str, str], round_: int) -> list[str]:
    return list(servers) if round_ % 2 == 0 else list(reversed(servers))


def _check(timings: Sequence[Timing]) -> None:
    failed = [t.error for t in timings if t.error is not None]
    assert not failed, f"{len(failed)} requests failed, the first: {failed[0]}"


def _latencies(timings: Sequence[Timing]) -> dict[str, float]:
    figures = {}
    for name in ("ttft", "tpot"):
        values = sorted(
            (t.ttft_seconds if name == "ttft" else t.tpot_seconds) * 1e3 for t in timings
        )
        figures[f"{name}_ms_p50"] = round(values[len(values) // 2], 3)
        figures[f"{name}_ms_p99"] = round(values[len(values) * 99 // 100], 3)
    return figures
