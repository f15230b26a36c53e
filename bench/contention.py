"""Two servers of two ranks each, more demand than memory: kvtide against mapping by calls.

    python bench/contention.py --pairs 5 --delay-ms 0

Real vLLM on the CPU. The other way is written for this benchmark (`synchronous/`): admission in the
workers, one call to every worker a growth that the scheduler waits for, and a retry at once.
Pairs are interleaved. Run it in an environment that has vLLM, on a quiet machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtide.bench.machine import machine
from kvtide.units import MIB
from kvtide.verify.client import metric, random_prompts
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.servers import Server

HERE = Path(__file__).parent
KIND = "llama-wide"
NAMES = ("a", "b")
ARGUMENTS = (
    *("--max-model-len", "2048", "--block-size", "32", "--served-model-name", "m"),
    *("--tensor-parallel-size", "2"),
)


def ask(url: str, prompt: list[int], max_tokens: int) -> dict[str, float]:
    """One streamed request: seconds to its first token, and between the others."""
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=600)
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.monotonic()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    times = []
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    connection.close()
    return {
        "ttft": times[0] - started,
        "tpot": (times[-1] - times[0]) / max(1, max_tokens - 1),
        "ended": times[-1],
    }


def measure(
    models: Path, *, synchronous: bool, delay: float, requests: int, size_bytes: int, seed: int
) -> dict[str, Any]:
    """Both servers, once warmed, under the load; what clients and servers saw."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        work = Path(directory)
        (work / "counts").mkdir()
        environ = {
            "KVTIDE": "1",
            "KVTIDE_DIR": str(work / "ledgers"),
            "KVTIDE_HOST_DEVICE": f"bench-{os.getpid()}",
            "KVTIDE_HOST_MEMORY": str(size_bytes),
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "PYTHONPATH": os.pathsep.join(
                [str(HERE / "synchronous"), os.environ.get("PYTHONPATH", "")]
            ),
            "KV_BENCH_COUNTS": str(work / "counts"),
            "KV_BENCH_SYNCHRONOUS": "1" if synchronous else "0",
            "KV_BENCH_DELAY": str(delay),
        }
        servers = [
            Server(
                ensure_model(KIND, models),
                log=work / f"{name}.log",
                arguments=["--dtype", dtype_of(KIND), *ARGUMENTS],
                environ=environ | {"KVTIDE_NAME": name},
            ).start()
            for name in NAMES
        ]
        try:
            for server in servers:
                server.wait_ready(600)
                for prompt in random_prompts(1, 2, 64):
                    ask(server.url, prompt, 8)
            jobs = [
                (server.url, prompt, 96)
                for number, server in enumerate(servers)
                for prompt in random_prompts(seed + number, requests, 250)
            ]
            started = time.monotonic()
            with ThreadPoolExecutor(len(jobs)) as pool:
                answers = list(pool.map(lambda job: ask(*job), jobs))
            seconds = max(a["ended"] for a in answers) - started
            preemptions = sum(metric(s.url, "vllm:num_preemptions_total") for s in servers)
            time.sleep(1)
        finally:
            for server in servers:
                server.stop()
        counts: dict[str, int] = {}
        for path in (work / "counts").iterdir():
            for key, value in json.loads(path.read_text()).items():
                counts[key] = counts.get(key, 0) + value
        return {
            "tokens_a_second": round(96 * len(jobs) / seconds, 2),
            "ttft_p50": _quantile([a["ttft"] for a in answers], 0.5),
            "ttft_p99": _quantile([a["ttft"] for a in answers], 0.99),
            "tpot_p50": _quantile([a["tpot"] for a in answers], 0.5),
            "tpot_p99": _quantile([a["tpot"] for a in answers], 0.99),
            "preemptions": preemptions,
            "requests": len(jobs),
            **counts,
        }


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 4)


def _load() -> list[float]:
    return [float(x) for x in Path("/proc/loadavg").read_text().split()[:3]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--requests", type=int, default=32, help="of each server")
    parser.add_argument("--size-mib", type=int, default=128)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "kv-models")
    parser.add_argument("--out", type=Path, default=HERE / "results/contention.json")
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        pair: dict[str, Any] = {}
        # Which one comes first changes from pair to pair.
        for synchronous in (False, True) if number % 2 == 0 else (True, False):
            name = "synchronous" if synchronous else "kvtide"
            load = _load()
            pair[name] = measure(
                options.models,
                synchronous=synchronous,
                delay=options.delay_ms / 1e3,
                requests=options.requests,
                size_bytes=options.size_mib * MIB,
                seed=100 * number,
            ) | {"load_before": load}
            print(name, pair[name], flush=True)
        pairs.append(pair)
        result = {
            "machine": machine(),
            "delay_ms": options.delay_ms,
            "pairs": pairs,
            "median_ratios": {
                key: round(
                    statistics.median(p["kvtide"][key] / p["synchronous"][key] for p in pairs), 4
                )
                for key in ("tokens_a_second", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
            },
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(result["median_ratios"])


if __name__ == "__main__":
    sys.exit(main())
