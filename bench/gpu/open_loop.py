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

from kvtide.bench.stream import Timing, closed_loop, open_loop
from kvtide.units import GIB, MIB, parse_size
from kvtide.verify.client import random_prompts
from kvtide.verify.models import VOCABULARY, ensure_model
from kvtide.verify.servers import Server

NAME = "m"
SHARE = 0.8


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


def latencies(timings: Sequence[Timing], output: int) -> dict[str, dict[str, float]]:
    """Milliseconds. TPOT is by tokens asked for: a busy server sends several in one piece."""
    tpot = [t.tpot_seconds * (t.tokens - 1) / (output - 1) * 1e3 for t in timings]
    return {"ttft_ms": spread([t.ttft_seconds * 1e3 for t in timings]), "tpot_ms": spread(tpot)}


def errors(timings: Sequence[Timing]) -> list[str]:
    return [t.error for t in timings if t.error is not None]


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
        results: dict[str, Any] = {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "concurrency": concurrency,
            "kv_bytes": kv_bytes,
            "closed_loop_per_s": closed,
            "rate": round(rate, 2),
        }
        for round_ in range(options.rounds):
            start = round_ % len(servers)
            order = list(servers)[start:] + list(servers)[:start]
            for name in order:
                seed = 100 + round_
                asked = random_prompts(seed, requests // options.rounds, prompt)
                opened[name] += open_loop(servers[name].url, NAME, asked, output, rate, seed)
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
