"""Latency of the 8B shape under an open loop: a native server and one under kvtide, both resident.

    python bench/gpu/open_loop.py [--requests 1000] [--rounds 4] [--second-native]
    python bench/gpu/open_loop.py --cpu                             tiny, without a GPU

Real `vllm serve` processes with CUDA graphs, weights of random bytes, and a vocabulary of 2,048, so
that a tokenizer made here fits. The native server's rate in one closed loop is its saturation; then
each server gets `--requests` at 80% of that, at random moments, in rounds that swap who goes first;
the others are idle meanwhile. A second native server, where asked for, shows how far two processes
of one kind differ. Some 90 seconds to start one after the other, 10 a server for the closed loop,
30 for 1000 requests of (512, 128): 190 in all. Saved after each round.

`kvtide bench serve` does the same with any model, but starts one server after the other, eagerly.

Ends with 1 where a request failed or a server died.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drive import host_environ, ledgers, save, spread, table, wait_for_file
from engine import config_of

from kvtide.bench.pairs import paired_ratios
from kvtide.bench.stream import Timing, closed_loop, open_loop
from kvtide.units import GIB, MIB, parse_size
from kvtide.verify.client import metric, random_prompts
from kvtide.verify.models import VOCABULARY, ensure_model
from kvtide.verify.servers import Server

NAME = "m"
SHARE = 0.8
# What vLLM counts: a server that is slower had more steps, or longer ones.
COUNTERS = {
    "steps": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
}


def make_model(directory: Path) -> Path:
    """The 8B shape without weights, with a tokenizer."""
    tiny = ensure_model("llama", directory / "tiny")
    model = directory / "8b"
    model.mkdir()
    for path in tiny.iterdir():
        if "token" in path.name:
            (model / path.name).write_bytes(path.read_bytes())
    config = {**config_of("8b"), "vocab_size": VOCABULARY}
    (model / "config.json").write_text(json.dumps(config))
    return model


def tpot_ms(timing: Timing, output: int) -> float:
    """By tokens asked for: a busy server sends several in one piece."""
    return timing.tpot_seconds * (timing.tokens - 1) / (output - 1) * 1e3


def latencies(timings: Sequence[Timing], output: int) -> dict[str, dict[str, float]]:
    """Milliseconds."""
    return {
        "ttft_ms": spread([t.ttft_seconds * 1e3 for t in timings]),
        "tpot_ms": spread([tpot_ms(t, output) for t in timings]),
    }


def errors(timings: Sequence[Timing]) -> list[str]:
    return [t.error for t in timings if t.error is not None]


def one_round(
    url: str, prompts: Sequence[Sequence[int]], output: int, rate: float, seed: int
) -> tuple[list[Timing], dict[str, float]]:
    """Each request's times, and of the round the medians and what the server counted."""
    before = {key: metric(url, counter) for key, counter in COUNTERS.items()}
    timings = open_loop(url, NAME, prompts, output, rate, seed)
    counted = {key: metric(url, counter) - before[key] for key, counter in COUNTERS.items()}
    found = latencies([t for t in timings if t.error is None], output)
    medians = {f"{figure[:4]}_p50_ms": of["p50"] for figure, of in found.items()}
    return timings, {**medians, **counted}


def by_rounds(rounds: Sequence[dict[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """The medians of each round, which has the same requests at the same moments, to native's."""
    of = {who: [r for r in rounds if r["server"] == who] for who in (name, "native")}
    return {
        figure: paired_ratios([r[figure] for r in of[name]], [r[figure] for r in of["native"]])
        for figure in ("ttft_p50_ms", "tpot_p50_ms", "steps")
    }


def show(results: dict[str, Any]) -> None:
    heads: list[object] = [
        "server",
        "closed loop/s",
        "requests",
        "TTFT p50 ms",
        "p99",
        "TPOT p50 ms",
        "p99",
        "failed",
    ]
    rows: list[list[object]] = [heads]
    picked: dict[str, list[float]] = {}
    for name, told in results["open_loop"].items():
        picked[name] = [
            told[of][which] for of in ("ttft_ms", "tpot_ms") for which in ("p50", "p99")
        ]
        closed = results["closed_loop_per_s"][name]
        rows.append([name, closed, told["requests"], *picked[name], told["failed"]])
    figures = [f"{of} {which}" for of in ("TTFT", "TPOT") for which in ("p50", "p99")]
    results["to_native"] = {}
    for name in picked:
        if name != "native":
            pairs = zip(picked[name], picked["native"], strict=True)
            ratios = [round(mine / native, 3) for mine, native in pairs]
            results["to_native"][name] = dict(zip(figures, ratios, strict=True))
            rows.append([f"{name} / native", "", "", *ratios, ""])
            by_round = by_rounds(results["rounds"], name)
            results["to_native"][name]["by round"] = by_round
            for figure, ratio in by_round.items():
                print(f"{name} / native by round, {figure}: {ratio}")
    print(f"{results['rate']:.1f} requests a second, {SHARE:.0%} of native's closed loop")
    table(rows)


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, help="to each server; default 1000, with --cpu 40")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--concurrency", type=int, help="closed loop; default 256, with --cpu 8")
    parser.add_argument("--kv", type=parse_size, default=40 * GIB, help="most KV cache of each")
    parser.add_argument(
        "--second-native", action="store_true", help="how far do two native servers differ?"
    )
    parser.add_argument("--after", type=Path, help="begin to measure once this file is there")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    requests = options.requests or (40 if options.cpu else 1000)
    concurrency = options.concurrency or (8 if options.cpu else 256)
    prompt, output = (64, 16) if options.cpu else (512, 128)
    kv_bytes = 64 * MIB if options.cpu else options.kv
    flags = ["--served-model-name", NAME, "--max-model-len", "2048"]
    if options.cpu:
        flags += ["--dtype", "float32"]
    else:
        flags += ["--load-format", "dummy", "--no-enforce-eager", "--max-num-seqs", "256"]
        flags += ["--gpu-memory-utilization", "0.3"]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtide-open-")))
        model = ensure_model("llama", work) if options.cpu else make_model(work)
        elastic = {
            "KVTIDE": "1",
            "KVTIDE_DIR": str(stack.enter_context(ledgers())),
            "KVTIDE_BUDGET": str(kv_bytes),
        }
        host = host_environ() if options.cpu else {}
        # A size of its own: a profile of a native engine does not bear a neighbour that starts.
        sized = [*flags, "--kv-cache-memory-bytes", str(kv_bytes)]
        natives = ["native", "second native"] if options.second_native else ["native"]
        servers = {
            name: Server(model, log=work / f"{name}.log", arguments=sized, environ=host)
            for name in natives
        }
        servers["kvtide"] = Server(
            model, log=work / "kvtide.log", arguments=flags, environ={**host, **elastic}
        )
        for name, server in servers.items():
            # What native has compiled kvtide uses: two that compile at once tune kernels apart, and
            # are then not equally fast.
            stack.enter_context(server.start())
            server.wait_ready(400)
            print(f"{name} up after {time.monotonic() - began:.0f} s", flush=True)
        wait_for_file(options.after)
        failed: list[str] = []
        for number, server in enumerate(servers.values()):
            warm = random_prompts(900 + number, concurrency // 2, prompt)
            _, timings = closed_loop(server.url, NAME, warm, output, concurrency)
            failed += errors(timings)
        closed: dict[str, float] = {}
        for name, server in servers.items():
            prompts = random_prompts(1, 2 * concurrency, prompt)
            seconds, timings = closed_loop(server.url, NAME, prompts, output, concurrency)
            failed += errors(timings)
            closed[name] = round(len(prompts) / seconds, 2)
            print(f"closed loop, {name}: {closed[name]} requests a second", flush=True)
        rate = SHARE * closed["native"]
        opened: dict[str, list[Timing]] = {name: [] for name in servers}
        rounds: list[dict[str, Any]] = []
        results: dict[str, Any] = {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "concurrency": concurrency,
            "kv_bytes": kv_bytes,
            "closed_loop_per_s": closed,
            "rate": round(rate, 2),
            "rounds": rounds,
        }
        for round_ in range(options.rounds):
            start = round_ % len(servers)
            order = list(servers)[start:] + list(servers)[:start]
            for name in order:
                asked = random_prompts(100 + round_, requests // options.rounds, prompt)
                timings, counted = one_round(servers[name].url, asked, output, rate, 100 + round_)
                opened[name] += timings
                rounds.append({"round": round_ + 1, "server": name, **counted})
            results["open_loop"] = {
                name: {
                    "requests": len(timings),
                    "failed": len(errors(timings)),
                    "ttft_each_ms": [round(t.ttft_seconds * 1e3, 2) for t in timings],
                    **latencies([t for t in timings if t.error is None], output),
                }
                for name, timings in opened.items()
            }
            save("open_loop", results)
            print(f"round {round_ + 1} done after {time.monotonic() - began:.0f} s", flush=True)
        failed += [why for timings in opened.values() for why in errors(timings)]
        died = [name for name, server in servers.items() if server.exit_status() is not None]
        for name in died:
            print(servers[name].log_tail(), flush=True)
    show(results)
    save("open_loop", results)
    for why in sorted(set(failed)):
        print(f"{failed.count(why)} requests failed: {why}", flush=True)
    return 1 if failed or died else 0


if __name__ == "__main__":
    sys.exit(main())
