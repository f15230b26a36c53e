"""Two servers under bursts, limit changes, kills and restarts, for as long as you say.

    python bench/soak.py --minutes 60 --out soak.json

Real vLLM on the CPU, on one host device of 256 MiB. One of them is killed and started again, the
other lives through it all. Nothing may grow: memory and descriptors of a server's life (oneDNN's
cache of shapes is kept small, see `memory_growth.py`), files beside the ledger, its rows, what the
kernel says is held. Every request has to be answered that was not on a server when that was killed.
Exit status 1 where something is not so.
Run it in an environment that has vLLM; `--minutes 1440` is a day.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtide import control
from kvtide.bench.machine import machine
from kvtide.device.census import used_bytes
from kvtide.errors import KvtideError
from kvtide.ledger import Ledger, Snapshot
from kvtide.units import MIB, format_size
from kvtide.verify.client import Completion, complete, random_prompts
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.private import private_directory
from kvtide.verify.servers import Server

KIND = "llama-wide"
NAMES = ("a", "b")
# The other one lives long enough to show what grows.
MORTAL = "a"
DEVICE_BYTES = 256 * MIB
# Allocators and caches of the engine itself settle in this time; after it a life may not grow.
WARM_SECONDS = 120.0
ALLOWED_BYTES_PER_HOUR = 64 * MIB
JUDGED_HOURS = 0.4
ALLOWED_DESCRIPTORS = 4
SETTLES_SECONDS = 120.0


@dataclass
class Life:
    """One server from its start to its end: memory and descriptors of all its processes."""

    name: str
    server: Server
    begun: float
    looks: list[tuple[float, int, int]] = field(default_factory=list)

    def look(self, now: float) -> None:
        pids = self.server.pids()
        self.looks.append((now, sum(map(anonymous_bytes, pids)), sum(map(descriptors, pids))))

    def growth(self) -> dict[str, Any] | None:
        """Between the first look after the warm-up and the last one."""
        warm = [look for look in self.looks if look[0] - self.begun > WARM_SECONDS]
        if len(warm) < 3:
            return None
        # What a burst has left is not what stays: the least of each half.
        half = len(warm) // 2
        first, last = warm[:half], warm[half:]
        hours = (last[-1][0] - warm[0][0]) / 3600
        grown_bytes = min(look[1] for look in last) - min(look[1] for look in first)
        return {
            "name": self.name,
            "seconds": round(self.looks[-1][0] - self.begun),
            "grown_bytes": grown_bytes,
            "hours": round(hours, 3),
            "grown_descriptors": min(look[2] for look in last) - min(look[2] for look in first),
        }


def anonymous_bytes(pid: int) -> int:
    """What a process has for itself alone: neither files nor the device's memory."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_tracker(pid: int) -> bool:
    """Whether it is Python's own helper for shared memory, which a server does without."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


class Soak:
    def __init__(self, work: Path, seed: int) -> None:
        self.work = work
        self.dice = random.Random(seed)
        self.ledgers = work / "ledgers"
        self.uuid = f"soak-{os.getpid()}"
        self.model = ensure_model(KIND, work / "models")
        self.lives: dict[str, Life] = {}
        self.ended: list[Life] = []
        self.happened: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.files: list[int] = []

    # ---- servers ----

    def start(self, name: str) -> None:
        environ = {
            "KVTIDE": "1",
            "KVTIDE_NAME": name,
            "KVTIDE_DIR": str(self.ledgers),
            "KVTIDE_HOST_DEVICE": self.uuid,
            "KVTIDE_HOST_MEMORY": str(DEVICE_BYTES),
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
        }
        server = Server(
            self.model,
            log=self.work / f"{name}.log",
            arguments=[
                *("--served-model-name", "m", "--dtype", dtype_of(KIND)),
                *("--max-model-len", "2048", "--block-size", "32"),
            ],
            environ=environ,
        )
        server.start().wait_ready()
        self.lives[name] = Life(name, server, time.monotonic())
        self.happened["starts"] += 1

    def end(self, name: str, *, kill: bool) -> None:
        life = self.lives.pop(name)
        if kill:
            pids = [pid for pid in life.server.pids() if not is_tracker(pid)]
            os.kill(self.dice.choice(pids), signal.SIGKILL)
            self.settles(f"the rest of {name} ends", lambda: not life.server.pids())
        life.server.stop()
        self.ended.append(life)
        self.happened["kills" if kill else "stops"] += 1

    # ---- what it does ----

    def burst(self, pool: ThreadPoolExecutor, name: str) -> Future[list[Completion]]:
        prompts = random_prompts(
            self.dice.randrange(99), self.dice.randrange(4, 28), self.dice.randrange(16, 480)
        )
        return pool.submit(
            complete,
            self.lives[name].server.url,
            prompts,
            max_tokens=self.dice.randrange(8, 64),
            model="m",
        )

    def steer(self) -> None:
        name = self.dice.choice(NAMES)
        size = self.dice.choice((None, 64 * MIB, 128 * MIB, 192 * MIB))
        act = self.dice.randrange(4)
        try:
            if act == 0:
                control.limit(name, size, now=self.dice.random() < 0.3, directory=self.ledgers)
            elif act == 1:
                control.set(name, min=self.dice.choice((0, 32 * MIB)), directory=self.ledgers)
            elif act == 2:
                control.set(name, priority=self.dice.randrange(-1, 2), directory=self.ledgers)
            else:
                control.trim(name, to=32 * MIB, directory=self.ledgers)
            self.happened["terms"] += 1
        except KvtideError as error:
            # A min above the limit that was drawn before it, say: a clear refusal.
            self.happened["refused terms"] += 1
            print(f"  refused: {str(error).splitlines()[0]}")

    def cycle(self, pool: ThreadPoolExecutor) -> None:
        bursts = {name: self.burst(pool, name) for name in NAMES}
        time.sleep(self.dice.uniform(0.2, 2.0))
        self.steer()
        killed = None
        if self.dice.random() < 0.15:
            killed = MORTAL
            self.end(killed, kill=True)
        for name, burst in bursts.items():
            answers = burst.result()
            failed = [answer for answer in answers if answer.error is not None]
            self.happened["answered"] += len(answers) - len(failed)
            if failed and name == killed:
                self.happened["lost with a killed server"] += len(failed)
            elif failed:
                self.wrong.append(f"{len(failed)} requests to {name} failed: {failed[0].error}")
        if killed is None and self.dice.random() < 0.05:
            killed = MORTAL
            self.end(killed, kill=False)
        if killed is not None:
            self.start(killed)

    # ---- what must hold ----

    def snapshot(self) -> Snapshot:
        (path,) = Ledger.existing(self.ledgers)
        with Ledger.read(path) as observer:
            return observer.snapshot()

    def settles(self, what: str, holds: Any) -> None:
        deadline = time.monotonic() + SETTLES_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                self.wrong.append(f"not within {SETTLES_SECONDS:.0f} s: {what}")
                return
            time.sleep(0.1)

    def look(self) -> None:
        """At rest: rows, files and the kernel's figure are what two servers have, and no more."""
        self.settles(
            "one row an instance and pool, all live, none waiting",
            lambda: (
                [i.name for i in sorted(self.snapshot().instances, key=lambda i: i.name)]
                == list(NAMES)
                and all(len(i.pools) == 1 and i.pools[0].live for i in self.snapshot().instances)
            ),
        )
        self.settles(
            "what the kernel says is held is what is charged",
            lambda: used_bytes(self.uuid) == self.snapshot().charged_bytes,
        )
        now = time.monotonic()
        for life in self.lives.values():
            life.look(now)
        self.files.append(len(list(self.ledgers.iterdir())))

    def run(self, minutes: float) -> dict[str, Any]:
        begun = time.monotonic()
        for name in NAMES:
            self.start(name)
        own = []
        with ThreadPoolExecutor(len(NAMES)) as pool:
            while time.monotonic() - begun < minutes * 60:
                self.cycle(pool)
                self.look()
                own.append((anonymous_bytes(os.getpid()), descriptors(os.getpid())))
                print(
                    f"{(time.monotonic() - begun) / 60:7.1f} min  charged "
                    f"{format_size(self.snapshot().charged_bytes)}, {self.files[-1]} files, "
                    + ", ".join(f"{k} {v}" for k, v in sorted(self.happened.items())),
                    flush=True,
                )
        for name in NAMES:
            self.end(name, kill=False)
        self.settles("nothing is held in the end", lambda: used_bytes(self.uuid) == 0)
        return self.report(time.monotonic() - begun, own)

    def report(self, seconds: float, own: list[tuple[int, int]]) -> dict[str, Any]:
        growths = [g for life in self.ended if (g := life.growth()) is not None]
        for g in growths:
            # What is shorter says nothing of an hour: an engine's own allocators vary by more.
            long_enough = g["hours"] >= JUDGED_HOURS
            if long_enough and g["grown_bytes"] > ALLOWED_BYTES_PER_HOUR * g["hours"]:
                self.wrong.append(f"{g['name']} grew by {format_size(g['grown_bytes'])}: {g}")
            if g["grown_descriptors"] > ALLOWED_DESCRIPTORS:
                self.wrong.append(f"{g['name']} has {g['grown_descriptors']} descriptors more")
        if seconds > JUDGED_HOURS * 3600 + 2 * WARM_SECONDS and all(
            g["hours"] < JUDGED_HOURS for g in growths
        ):
            self.wrong.append("no server lived long enough to show whether its memory grows")
        # Of a killed server something may lie there until the next look for leftovers.
        settled = self.files[len(self.files) // 2 :]
        if settled and min(settled) > min(self.files[: len(self.files) // 2 or 1]):
            self.wrong.append(f"files beside the ledger grew: {self.files}")
        own_descriptors = [count for _, count in own]
        if own and own_descriptors[-1] > own_descriptors[0] + ALLOWED_DESCRIPTORS:
            self.wrong.append(f"this process's descriptors grew: {own_descriptors}")
        return {
            "seconds": round(seconds),
            "happened": dict(sorted(self.happened.items())),
            "lives": growths,
            "files": {"least": min(self.files, default=0), "most": max(self.files, default=0)},
            "own_bytes": [own[0][0], own[-1][0]] if own else [],
            "own_descriptors": own_descriptors[:1] + own_descriptors[-1:],
            "wrong": self.wrong,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="default: at random, and printed")
    parser.add_argument("--out", type=Path, help="a report as JSON")
    options = parser.parse_args()
    seed = options.seed or random.randrange(1, 1 << 30)
    print(f"seed {seed}")
    with private_directory("kvtide-soak-") as work:
        soak = Soak(work, seed)
        try:
            report = soak.run(options.minutes) | {"seed": seed}
        finally:
            for life in soak.lives.values():
                life.server.stop()
    text = json.dumps({"machine": machine(), **report}, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
