"""What a grant and a refund cost, alone and with eight processes at once.

python bench/ledger.py [--out bench/results/ledger.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvtide
from kvtide.ledger import DeviceSpec, Granted, Ledger
from kvtide.units import GIB, MIB

PROCESSES = 8
SECONDS = 3.0
REPEATS = 25
PAIRS = 1_000
TOTAL = 64 * GIB


def open_ledger(directory: Path) -> Ledger:
    return Ledger.open(directory, DeviceSpec("bench", "host", "bench", TOTAL, 0, None, 2 * MIB))


def enroll(ledger: Ledger, name: str, limit_bytes: int | None = None) -> Any:
    instance = ledger.register(name, explicit=False, limit_bytes=limit_bytes)
    return ledger.enroll(
        instance,
        pool_name="kv",
        rank=0,
        blocks_total=1,
        block_bytes=1,
        sampler=lambda: TOTAL,
    )


def pair_us(account: Any) -> dict[str, list[float]]:
    """Microseconds of one grant and its refund, one figure a repeat: by the wall and by the CPU.

    The two differ by what other processes of the machine take.
    """
    wall, cpu = [], []
    for _ in range(REPEATS):
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(PAIRS):
            account.grant(2 * MIB)
            account.refund(2 * MIB)
        cpu.append(round((time.process_time() - began_cpu) / PAIRS * 1e6, 2))
        wall.append(round((time.perf_counter() - began) / PAIRS * 1e6, 2))
    return {"wall_us": wall, "cpu_us": cpu}


def uncontended(directory: Path) -> dict[str, Any]:
    ledger = open_ledger(directory)
    account = enroll(ledger, "a")
    cases = {"one instance": pair_us(account)}
    ledger.set_limit("a", 2 * GIB)
    cases["one instance, with a limit"] = pair_us(account)
    for n in range(15):
        enroll(ledger, f"other-{n}")
    cases["16 instances, with a limit"] = pair_us(account)
    for n in range(15):
        ledger.set_terms(
            f"other-{n}",
            lambda t, n=n: t._replace(min_bytes=GIB, priority=n, headroom_bytes=GIB),
        )
    cases["16 instances, with limit, mins, priorities and headroom"] = pair_us(account)
    ledger.close()
    return {
        case: {
            "pair_us_median": round(statistics.median(us["wall_us"]), 2),
            "pair_us_min": min(us["wall_us"]),
            "pair_us_max": max(us["wall_us"]),
            "pair_cpu_us_median": round(statistics.median(us["cpu_us"]), 2),
            "raw": us,
        }
        for case, us in cases.items()
    }


def worker(directory: Path) -> None:
    """Grant for a while, refund half of it, and say what came of it."""
    ledger = open_ledger(directory)
    account = enroll(ledger, "w")
    print("ready", flush=True)
    sys.stdin.readline()
    granted = refunded = misses = 0
    until = time.perf_counter() + SECONDS
    pairs = 0
    while time.perf_counter() < until:
        answer = account.grant(2)
        if isinstance(answer, Granted):
            granted += 2
            account.refund(1)
            refunded += 1
            pairs += 1
        else:
            misses += 1
    while account.owed_bytes:
        account.grant(0)
    print(
        json.dumps(
            {
                "pairs": pairs,
                "misses": misses,
                "lost_bytes": granted - refunded - account.charge_bytes,
            }
        ),
        flush=True,
    )
    sys.stdin.readline()


def contended(directory: Path) -> dict[str, Any]:
    # One holder keeps the file as it is while the workers come and go.
    ledger = open_ledger(directory)
    enroll(ledger, "keeper")
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(PROCESSES)
    ]
    for process in workers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in workers:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = []
    for process in workers:
        assert process.stdout is not None
        results.append(json.loads(process.stdout.readline()))
    pairs = sum(result["pairs"] for result in results)
    charged = ledger.snapshot().charged_bytes
    for process in workers:
        process.communicate("end\n")
    ledger.close()
    return {
        "processes": PROCESSES,
        "seconds": SECONDS,
        "pairs_per_second": round(pairs / SECONDS),
        "misses": sum(result["misses"] for result in results),
        "lost_bytes": pairs - charged,
        "raw": results,
    }


def machine() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvtide": kvtide.__version__,
        "load_before": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/ledger.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    directory = Path(tempfile.mkdtemp(prefix="kvtide-bench-", dir="/dev/shm"))
    try:
        results = {"machine": machine(), "uncontended": uncontended(directory)}
        results["contended"] = contended(directory)
    finally:
        shutil.rmtree(directory)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({k: v for k, v in results.items() if k != "machine"}, indent=2))


if __name__ == "__main__":
    main()
