"""One engine over several ranks: kvtide against native in interleaved pairs, and what goes wrong.

    python bench/gpu/tp2.py [--tp 2] [--pairs 5]                    on GPUs
    python bench/gpu/tp2.py --tp 1                                      on one
    python bench/gpu/tp2.py --cpu [--tp 2]                              without one, small

Shown: tokens (where native equals itself), throughput in pairs, that the scheduler's process holds
no CUDA context, the growth of a batch against the slower rank's own mapping time, one device
starved by a third process, and what a killed worker leaves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drive import save

from kvtide.bench.stream import closed_loop
from kvtide.ledger import Ledger
from kvtide.verify.client import complete, random_prompts
from kvtide.verify.models import ensure_model
from kvtide.verify.servers import Server

NAME = "m"


def contexts() -> list[int] | None:
    """Pids that hold a CUDA context, as the driver tells; None without a GPU."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return sorted({int(line) for line in answer.stdout.split() if line.isdigit()})


class Pair:
    """A native and a kvtide server of the same flags."""

    def __init__(self, options: argparse.Namespace, work: Path, ledgers: Path) -> None:
        self.options = options
        self.ledgers = ledgers
        self.model = ensure_model("llama", work / "models")
        self.work = work
        flags = ["--served-model-name", NAME, "--tensor-parallel-size", str(options.tp)]
        flags += ["--max-model-len", "2048", "--dtype", "float32"]
        if not options.cpu:
            flags += ["--gpu-memory-utilization", "0.4"]
        self.flags = flags
        elastic = {"KVTIDE": "1", "KVTIDE_DIR": str(ledgers), "KVTIDE_NAME": "tp"}
        native: dict[str, str] = {}
        if options.cpu:
            devices = [f"{ledgers.name}-{rank}" for rank in range(options.tp)]
            elastic |= {
                "KVTIDE_HOST_DEVICE": ",".join(devices),
                "KVTIDE_HOST_MEMORY": "128MiB",
            }
            native["VLLM_CPU_KVCACHE_SPACE"] = "1"
            if options.tp > 1:
                bind = "|".join(["0", "1"] * options.tp)[: 2 * options.tp - 1]
                native["VLLM_CPU_OMP_THREADS_BIND"] = elastic["VLLM_CPU_OMP_THREADS_BIND"] = bind
        self.native = Server(self.model, log=work / "native.log", arguments=flags, environ=native)
        self.elastic = Server(self.model, log=work / "kvtide.log", arguments=flags, environ=elastic)

    def start(self) -> None:
        for server in (self.native, self.elastic):
            server.start()
            server.wait_ready()


def tokens(url: str, seed: int) -> list[tuple[int, ...]]:
    prompts = random_prompts(seed, 12, 300)
    answers = complete(url, prompts, max_tokens=48, model=NAME, concurrency=1)
    assert all(a.error is None for a in answers)
    return [a.tokens for a in answers]


def measure(pair: Pair, pairs: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"native": [], "kvtide": []}
    for round_ in range(pairs):
        order = [("native", pair.native.url), ("kvtide", pair.elastic.url)]
        for name, url in order if round_ % 2 == 0 else reversed(order):
            prompts = random_prompts(round_, 48, 256)
            seconds, timings = closed_loop(url, NAME, prompts, 64, 16)
            assert all(t.error is None for t in timings)
            rates[name].append(48 * 64 / seconds)
    ratios = sorted(k / n for k, n in zip(rates["kvtide"], rates["native"], strict=True))
    return {
        "tokens_per_s": rates,
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def held(ledgers: Path) -> dict[str, int]:
    """Bytes charged on each device."""
    charged = {}
    for path in Ledger.existing(ledgers):
        with Ledger.read(path) as observer:
            charged[path.name] = observer.snapshot().charged_bytes
    return charged


def starve(pair: Pair) -> dict[str, Any]:
    """Take most of one rank's device from outside; both ranks must agree, and requests go on."""
    options = pair.options
    if options.cpu:
        last = f"{pair.ledgers.name}-{options.tp - 1}"
        command = [sys.executable, "-m", "kvtide.device.ballast", "100MiB"]
        command += ["--total", "128MiB", "--uuid", last]
    else:
        hold = "import torch,time; x=torch.empty(60<<30,dtype=torch.uint8,device='cuda:%d');"
        hold += "print('held',flush=True); time.sleep(600)"
        command = [sys.executable, "-c", hold % (options.tp - 1)]
    ballast = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert ballast.stdout is not None
    ballast.stdout.readline()
    prompts = random_prompts(77, 24, 400)
    answers = complete(pair.elastic.url, prompts, max_tokens=32, model=NAME, concurrency=12)
    charged = held(pair.ledgers)
    ballast.kill()
    ballast.wait()
    return {
        "failed": sum(a.error is not None for a in answers),
        "charged_bytes": charged,
        "in_step": len(set(charged.values())) == 1,
    }


def kill_worker(pair: Pair) -> dict[str, Any]:
    """Kill one worker: how long until nothing of the server is left, and nothing is charged."""
    victim = pair.elastic.role_pid("Worker" if pair.options.tp == 1 else "Worker_TP0")
    start = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while pair.elastic.pids() and time.monotonic() - start < 30:
        time.sleep(0.01)
    gone = time.monotonic() - start
    for path in Ledger.existing(pair.ledgers):
        ledger = Ledger.attach(path)
        ledger.retire_dead()
        ledger.close()
    return {"gone_seconds": round(gone, 3), "charged_bytes": held(pair.ledgers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kvtide-tp-"))
    ledgers = Path(tempfile.mkdtemp(prefix="kvtide-tp-", dir="/dev/shm"))
    pair = Pair(options, work, ledgers)
    results: dict[str, Any] = {"tp": options.tp}
    try:
        pair.start()
        first, again = tokens(pair.native.url, 1), tokens(pair.native.url, 1)
        ours = tokens(pair.elastic.url, 1)
        sound = [n for n, (a, b) in enumerate(zip(first, again, strict=True)) if a == b]
        results["tokens"] = {
            "native_equals_itself": len(sound),
            "of": len(first),
            "kvtide_equals_native": sum(ours[n] == first[n] for n in sound),
        }
        held_by = contexts()
        core = pair.elastic.role_pid("EngineCore")
        results["scheduler_has_context"] = None if held_by is None else core in held_by
        results["throughput"] = measure(pair, options.pairs)
        results["starved"] = starve(pair)
        results["killed"] = kill_worker(pair)
    finally:
        for server in (pair.native, pair.elastic):
            server.stop()
        shutil.rmtree(ledgers, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    for name, value in results.items():
        print(name, value, flush=True)
    save(f"tp{options.tp}-{'cpu' if options.cpu else 'gpu'}", results)
    good = results["tokens"]["kvtide_equals_native"] == results["tokens"]["native_equals_itself"]
    return 0 if good and results["starved"]["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
