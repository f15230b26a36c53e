"""Two engines on one GPU and a ledger of 2 GiB, with 3.75 GiB wanted: nobody crashes, never above.

python bench/gpu/two.py
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from drive import Running, save

from kvtide.ledger import Ledger
from kvtide.units import GIB

BUDGET = 2 * GIB


class Sampler(threading.Thread):
    """Reads the ledger every 5 ms: the highest charges and budget that were seen."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.stop = False
        self.samples = self.high = self.budget = self.above = 0
        self.track: list[tuple[float, dict[str, int]]] = []

    def run(self) -> None:
        start = time.monotonic()
        while not self.stop:
            paths = Ledger.existing(self.directory) if self.directory.exists() else []
            for path in paths:
                with Ledger.read(path) as observer:
                    while not self.stop:
                        self.look(observer.snapshot(), time.monotonic() - start)
                        time.sleep(0.005)
            time.sleep(0.05)

    def look(self, snapshot: Any, at: float) -> None:
        charged = sum(i.charged_bytes for i in snapshot.instances)
        self.samples += 1
        self.high = max(self.high, charged)
        self.budget = max(self.budget, snapshot.budget_bytes)
        self.above += charged > snapshot.budget_bytes
        if not self.track or at - self.track[-1][0] > 0.05:
            held = {i.name: i.charged_bytes >> 20 for i in snapshot.instances}
            self.track.append((round(at, 3), held))


def main() -> int:
    flags = Path(tempfile.mkdtemp())
    ledger = Path(tempfile.mkdtemp(dir="/dev/shm"))
    environ = {"KVTIDE_DIR": str(ledger), "KVTIDE_BUDGET": str(BUDGET)}

    def meet(name: str, me: str, other: str) -> list[list[Any]]:
        return [
            ["touch", str(flags / f"{name}-{me}")],
            ["wait_for", str(flags / f"{name}-{other}")],
        ]

    def script(me: str, other: str, seed: int) -> list[list[Any]]:
        load = ["generate", "alone", 64, 512, 128, seed]
        both = ["generate", "both", 96, 512, 128, seed + 2]
        first, second = ([load], []) if me == "a" else ([], [load])
        return [
            *meet("up", me, other),
            *first,
            *meet("a-ran", me, other),
            *second,
            *meet("b-ran", me, other),
            ["figures"],
            both,
            ["figures"],
            ["preemptions"],
            *meet("done", me, other),
            ["reset"],
            ["figures"],
        ]

    sampler = Sampler(ledger)
    sampler.start()
    setup = {"system": "kvtide", "model": "dense", "utilization": 0.4}
    engines = [
        Running({**setup, "name": me}, script(me, other, seed), **environ)
        for me, other, seed in (("a", "b", 11), ("b", "a", 12))
    ]
    results = [engine.finish() for engine in engines]
    sampler.stop = True
    sampler.join()
    shutil.rmtree(ledger)
    shutil.rmtree(flags)
    for name, lines in zip("ab", results, strict=True):
        for line in lines:
            print(name, {k: v for k, v in line.items() if k not in ("digests", "log")}, flush=True)
    ended = [line for lines in results for line in lines if line["command"] == "ended"]
    answered = sum(
        len(line["digests"]) for r in results for line in r if line["command"] == "generate"
    )
    summary = {
        "budget_mib": BUDGET >> 20,
        "high_water_mib": sampler.high / 2**20,
        "samples": sampler.samples,
        "samples_above_budget": sampler.above,
        "requests_answered": answered,
        "engines_that_died": len(ended),
    }
    print(json.dumps(summary), flush=True)
    save("two", {"summary": summary, "a": results[0], "b": results[1], "memory": sampler.track})
    return 1 if ended or sampler.above or answered != 2 * (64 + 96) else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
