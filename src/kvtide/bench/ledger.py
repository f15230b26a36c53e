"""What a grant and its refund cost, against the bare lock they need; alone, and in a crowd."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtide.device.base import Device
from kvtide.ledger import Account, DeviceSpec, Granted, Ledger, Terms
from kvtide.units import GIB, MIB

__all__ = ["measure_ledger"]

_PROCESSES: Final = 8
_SECONDS: Final = 3.0
_REPEATS: Final = 25
_PAIRS: Final = 1_000
_SAMPLES: Final = 20
_TOTAL: Final = 64 * GIB


def measure_ledger(device: Device) -> dict[str, Any]:
    """Grants and refunds in a ledger of its own; samples of a device, against its bare verb.

    Returns
    -------
    dict
        Microseconds a pair by wall and by processor time, each with its raw figures; pairs a second
        of eight processes at once, and the bytes that they lost (0, or the ledger is wrong).
    """
    directory = Path(tempfile.mkdtemp(prefix="kvtide-bench-", dir="/dev/shm"))
    try:
        return {
            "load_before": round(os.getloadavg()[0], 2),
            "floor": _floor(directory / "lock"),
            "uncontended": _uncontended(directory),
            "sample": _sample(directory, device),
            "contended": _contended(directory),
        }
    finally:
        shutil.rmtree(directory)


def _open(directory: Path) -> Ledger:
    return Ledger.open(directory, DeviceSpec("bench", "host", "bench", _TOTAL, 0, None, 2 * MIB))


def _enroll(ledger: Ledger, name: str, sampler: Callable[[], int] = lambda: _TOTAL) -> Account:
    instance = ledger.register(name, explicit=False)
    return ledger.enroll(
        instance, pool_name="kv", rank=0, blocks_total=1, block_bytes=1, sampler=sampler
    )


def _timed(work: Callable[[], object], times: int, repeats: int) -> dict[str, Any]:
    """Microseconds of one piece of work; what other processes take is in the wall's alone."""
    wall, cpu = [], []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            work()
        cpu.append(round((time.process_time() - began_cpu) / times * 1e6, 2))
        wall.append(round((time.perf_counter() - began) / times * 1e6, 2))
    return {
        "wall_us_median": round(statistics.median(wall), 2),
        "wall_us_min": min(wall),
        "wall_us_max": max(wall),
        "cpu_us_median": round(statistics.median(cpu), 2),
        "raw": {"wall_us": wall, "cpu_us": cpu},
    }


def _floor(path: Path) -> dict[str, Any]:
    """Two turns of a bare file lock: what no grant and refund between processes can do without."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)

    def turns() -> None:
        for _ in range(2):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    try:
        return _timed(turns, _PAIRS, _REPEATS)
    finally:
        os.close(descriptor)


def _uncontended(directory: Path) -> dict[str, Any]:
    ledger = _open(directory)
    account = _enroll(ledger, "a")

    def pair() -> None:
        account.grant(2 * MIB)
        account.refund(2 * MIB)

    cases = {"one instance": _timed(pair, _PAIRS, _REPEATS)}
    ledger.set_limit("a", 2 * GIB)
    cases["one instance, with a limit"] = _timed(pair, _PAIRS, _REPEATS)
    for n in range(15):
        _enroll(ledger, f"other-{n}")
    cases["16 instances, with a limit"] = _timed(pair, _PAIRS, _REPEATS)
    for n in range(15):
        terms = {"min_bytes": GIB, "priority": n, "headroom_bytes": GIB}
        ledger.set_terms(f"other-{n}", partial(_replaced, terms))
    cases["16 instances, with limit, mins, priorities and headroom"] = _timed(
        pair, _PAIRS, _REPEATS
    )
    ledger.close()
    return cases


def _replaced(changes: dict[str, int], terms: Terms) -> Terms:
    return terms._replace(**changes)


def _sample(directory: Path, device: Device) -> dict[str, Any]:
    """One look at what is free: the device's own verb, and the ledger's sample over it."""
    ledger = _open(directory / "sampled")
    account = _enroll(ledger, "a", device.free_bytes)
    figures = {
        "floor": _timed(device.free_bytes, 1, _SAMPLES),
        "product": _timed(account.sample, 1, _SAMPLES),
    }
    ledger.close()
    return figures


def _contended(directory: Path) -> dict[str, Any]:
    # One holder keeps the file as it is while the workers come and go.
    ledger = _open(directory)
    _enroll(ledger, "keeper")
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(directory), str(_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(_PROCESSES)
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
        "processes": _PROCESSES,
        "seconds": _SECONDS,
        "pairs_per_second": round(pairs / _SECONDS),
        "misses": sum(result["misses"] for result in results),
        "lost_bytes": pairs - charged,
        "raw": results,
    }


def _work(directory: Path, seconds: float) -> None:
    """One of the crowd: grant for a while, refund half of it, and say what came of it."""
    ledger = _open(directory)
    account = _enroll(ledger, "w")
    print("ready", flush=True)
    sys.stdin.readline()
    granted = refunded = misses = pairs = 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if isinstance(account.grant(2), Granted):
            granted += 2
            account.refund(1)
            refunded += 1
            pairs += 1
        else:
            misses += 1
    while account.owed_bytes:
        account.grant(0)
    lost_bytes = granted - refunded - account.charge_bytes
    print(json.dumps({"pairs": pairs, "misses": misses, "lost_bytes": lost_bytes}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    _work(Path(sys.argv[1]), float(sys.argv[2]))
