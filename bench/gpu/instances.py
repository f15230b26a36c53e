"""Several engines on one GPU, bursts in turn: a fixed split, kvtide, and kvcached.

    python bench/gpu/instances.py [--engines 2 3] [--systems native kvtide kvcached]
    python bench/gpu/instances.py --late
    python bench/gpu/instances.py --cpu [--late]                    tiny, without a GPU

A burst is so many requests at once in one engine, the others idle, that they take 90% of the KV
budget of all together; each engine has its turn, twice. Of every request the time to its first
token is in the results, from vLLM's own record of it. The first burst, which finds all memory free,
is left out of the figures. `native` has the budget in equal parts, kvtide as `KVTIDE_BUDGET`. Of
kvcached (V1 runner) each engine may have the whole budget, and nothing limits their sum but the
device: more than the others have. So it has its bursts once more, `bounded`, where another process
holds the device but for as much as the others share, and what kvcached leaves free by itself.
Some 60 seconds a system and number of engines, the starts included, of which those that follow
each other on one machine are faster; with `--together` all start at once, and one is asked at a
time.

`--late`: an engine that starts while its neighbour is at full load of a device on which another
process holds the rest. It has the same number of blocks as the one that started alone, and no
request of either fails. Some 110 seconds.

Ends with 1 where a request failed, an engine died, charges were above the budget, or blocks differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from drive import (
    EngineEndedError,
    Memory,
    Running,
    ballast,
    has_kvcached,
    host_environ,
    ledgers,
    save,
    spread,
    table,
    wait_for_file,
    without_log,
)
from engine import token_bytes

from kvtide.errors import LedgerBusyError
from kvtide.ledger import Ledger
from kvtide.units import GIB, MIB, format_size, parse_size

FILL = 0.9  # of the budget, by one burst
NAMES = "abc"
BOUNDED = "kvcached, bounded"
KVCACHED_LEAVES = 0.05  # of a device, as it does unless told otherwise
HALVED = 2.0
BURST_SECONDS = 120  # an engine that takes longer for one hangs


class Shape(NamedTuple):
    """What the engines run, and how much of it."""

    model: str
    budget_bytes: int
    prompt: int
    output: int
    max_model_len: int
    late_leave_bytes: int
    late_load: tuple[int, int, int]  # requests at once, tokens of a prompt, of an answer
    late_burst: tuple[int, int, int]

    @property
    def requests(self) -> int:
        """Of one burst."""
        each = token_bytes(self.model) * (self.prompt + self.output)
        return int(FILL * self.budget_bytes / each)


ON_GPU = Shape("dense", 8 * GIB, 1024, 256, 4096, 20 * GIB, (320, 1536, 512), (32, 256, 32))
ON_HOST = Shape("tiny", 64 * MIB, 160, 64, 512, 0, (24, 160, 64), (4, 64, 8))


def setups(shape: Shape, system: str, engines: int, *, host: bool) -> list[dict[str, Any]]:
    setup: dict[str, Any] = {
        "system": system,
        "model": shape.model,
        "max_num_seqs": 256,
        "max_model_len": shape.max_model_len,
        "utilization": 0.95 if host else 0.3,
        "cpu": host,
    }
    if system == "native":
        setup["kv_bytes"] = shape.budget_bytes // engines
    if system == "kvcached":
        setup |= {"kv_bytes": shape.budget_bytes, "runner": 1}
    return [{**setup, "name": name} for name in NAMES[:engines]]


class Fleet:
    """The engines of one system, started together; what they share of ledgers and budget."""

    def __init__(
        self,
        shape: Shape,
        system: str,
        engines: int,
        environ: dict[str, str],
        *,
        rounds: int,
        host: bool,
    ) -> None:
        self.shape, self.system, self.engines, self.rounds = shape, system, engines, rounds
        self._environ = environ
        self._setups = setups(shape, system, engines, host=host)
        self._running: dict[str, Running] = {}
        self._memory: Memory | None = None
        self._began = 0.0

    def start(self, stack: ExitStack) -> None:
        """Start all; they end with the stack."""
        directory = stack.enter_context(ledgers())
        environ = {
            **self._environ,
            "KVTIDE_DIR": str(directory),
            "KVTIDE_BUDGET": str(self.shape.budget_bytes),
        }
        if self.system == "kvtide":
            self._memory = stack.enter_context(Memory(directory))
        self._began = time.monotonic()
        self._running = {
            setup["name"]: stack.enter_context(Running(setup, **environ)) for setup in self._setups
        }

    def wait_ready(self) -> dict[str, Any]:
        """What each said when it was up."""
        started = {name: engine.wait_result() for name, engine in self._running.items()}
        return {"started": started, "start_seconds": round(time.monotonic() - self._began, 1)}

    def measure(self, seed: int) -> dict[str, Any]:
        """All bursts in turn, after one short load that warms them up together."""
        shape = self.shape
        waiting = [
            (engine, engine.tell("generate", "warm", 16, shape.prompt, 16, 99))
            for engine in self._running.values()
        ]
        for engine, place in waiting:
            engine.wait_result(place)
        began = time.monotonic()
        done: list[dict[str, Any]] = []
        for round_ in range(self.rounds):
            for number, name in enumerate(self._running):
                done.append(self._burst(name, seed + 10 * round_ + number))
                print(self.engines, self.system, without_log(done[-1]), flush=True)
        return {
            "burst_seconds": round(time.monotonic() - began, 1),
            "began": round(began, 3),
            "bursts": done,
            "ttft_ms": spread([t for burst in done[1:] for t in burst["ttft_ms"]]),
            "complete": sum(b["complete"] for b in done),
            "asked": len(done) * shape.requests,
            "preemptions": sum(b["preemptions"] for b in done),
        }

    def measure_bounded(self, seed: int) -> dict[str, Any]:
        """The same once more where a ballast leaves of the device what the others share.

        For kvcached, whose engines otherwise have no joint bound. A burst of each comes first, for
        which torch takes the memory that it keeps; what is mapped for KV by then counts as theirs,
        and what kvcached leaves free by itself is left on top.
        """
        for number, name in enumerate(self._running):
            self._burst(name, seed + 100 + number)
        told = [engine.ask("mapped") for engine in self._running.values()]
        own_bytes = int(KVCACHED_LEAVES * told[0]["total_bytes"])
        mapped_bytes = sum(one["mapped_bytes"] for one in told)
        leave_bytes = max(0, self.shape.budget_bytes - mapped_bytes) + own_bytes
        with ballast(leave_bytes) as held_bytes:
            result = self.measure(seed)
        return {**result, "mapped_before_bytes": mapped_bytes, "ballast_bytes": held_bytes}

    def _burst(self, name: str, seed: int) -> dict[str, Any]:
        shape, engine = self.shape, self._running[name]
        place = engine.tell("burst", name, shape.requests, shape.prompt, shape.output, seed)
        return engine.wait_result(place, BURST_SECONDS)

    def close(self) -> dict[str, Any]:
        """End all; what of the ledger was seen."""
        for engine in self._running.values():
            engine.close()
        return {"memory": self._memory.stop() if self._memory else None}


def failures(result: dict[str, Any]) -> list[str]:
    found = []
    if result["complete"] != result["asked"]:
        found.append(f"{result['asked'] - result['complete']} requests failed")
    if result["memory"] and not result["memory"]["samples"]:
        found.append("nobody looked at the ledger")
    if result["memory"] and result["memory"]["samples_above_budget"]:
        found.append(f"{result['memory']['samples_above_budget']} samples above the budget")
    return found


def compare(results: dict[str, dict[str, Any]], shape: Shape) -> None:
    """One row a system and number of engines; then what of it was asked for."""
    rows: list[list[object]] = [
        [
            "engines",
            "system",
            "requests",
            "TTFT ms",
            "p50",
            "p99",
            "split/it",
            "p99",
            "preempted",
            "start s",
            "failed",
        ]
    ]
    verdicts = []
    for engines, systems in results.items():
        split = systems.get("native", {}).get("ttft_ms")
        for system, result in systems.items():
            if "error" in result:
                rows.append([engines, system, result["error"], *[""] * 8])
                continue
            mine = result["ttft_ms"]
            ratios = (
                ["", ""]
                if split is None
                else [round(split[which] / mine[which], 2) for which in ("mean", "p99")]
            )
            rows.append(
                [
                    engines,
                    system,
                    f"{len(result['bursts'])}x{shape.requests}",
                    mine["mean"],
                    mine["p50"],
                    mine["p99"],
                    *ratios,
                    result["preemptions"],
                    result["start_seconds"],
                    "; ".join(failures(result)) or "none",
                ]
            )
        ours = systems.get("kvtide", {}).get("ttft_ms")
        for which in ("mean", "p99"):
            if ours and split:
                held = split[which] >= HALVED * ours[which]
                verdicts.append(f"{engines} engines, {which} halved: {'yes' if held else 'MISSED'}")
            for name in ("kvcached", BOUNDED):
                other = systems.get(name, {}).get("ttft_ms")
                if ours and other:
                    held = ours[which] <= other[which]
                    verdicts.append(
                        f"{engines} engines, {which} no worse than {name}: "
                        f"{'yes' if held else 'MISSED'}"
                    )
    table(rows)
    print(*verdicts, sep="\n", flush=True)


def run_bursts(options: argparse.Namespace, shape: Shape, environ: dict[str, str]) -> int:
    results: dict[str, dict[str, Any]] = {str(engines): {} for engines in options.engines}
    failed = False

    def done(fleet: Fleet, system: str, result: dict[str, Any]) -> None:
        nonlocal failed
        wrong = "error" in result or bool(failures(result))
        failed |= wrong and fleet.system == "kvtide"
        results[str(fleet.engines)][system] = result
        told = {"shape": shape._asdict(), "requests": shape.requests, "fill": FILL}
        save("instances", {**told, "together": options.together, "engines": results})

    print(
        f"{shape.requests} requests of ({shape.prompt}, {shape.output}) a burst, "
        f"{format_size(shape.budget_bytes)} of KV cache in all",
        flush=True,
    )
    systems = [s for s in options.systems if s != "kvcached" or has_kvcached()]
    if len(systems) < len(options.systems):
        print("kvcached is not installed here: left out", flush=True)
    fleets = [
        Fleet(shape, system, engines, environ, rounds=options.rounds, host=options.cpu)
        for engines in options.engines
        for system in systems
    ]
    with ExitStack() as all_together:
        up: dict[Fleet, dict[str, Any]] = {}
        if options.together:
            for fleet in fleets:
                fleet.start(all_together)
            for fleet in fleets:
                with reported(fleet, done):
                    up[fleet] = fleet.wait_ready()
            print("all are up", flush=True)
        wait_for_file(options.after)
        for fleet in fleets:
            if options.together and fleet not in up:
                continue
            with ExitStack() as alone, reported(fleet, done):
                if fleet not in up:
                    fleet.start(alone)
                    up[fleet] = fleet.wait_ready()
                seed = 1000 * fleet.engines
                found = fleet.measure(seed)
                if fleet.system == "kvcached":
                    with reported(fleet, done, BOUNDED):
                        bounded = fleet.measure_bounded(seed)
                        done(fleet, BOUNDED, {**up[fleet], **bounded, "memory": None})
                done(fleet, fleet.system, {**up[fleet], **found, **fleet.close()})
    compare(results, shape)
    return 1 if failed else 0


@contextmanager
def reported(
    fleet: Fleet, done: Callable[[Fleet, str, dict[str, Any]], None], system: str | None = None
) -> Iterator[None]:
    """An engine that ends, or hangs, is a result; the other systems have their turn."""
    try:
        yield
    except EngineEndedError as error:
        print(error, flush=True)
        done(fleet, system or fleet.system, {"error": "ended"})


def free_share(directory: Path) -> float:
    """How much of what the ledger lends is free; 1 before there is one."""
    for path in Ledger.existing(directory):
        with suppress(LedgerBusyError), Ledger.read(path) as observer:
            snapshot = observer.snapshot()
            return snapshot.free_bytes / max(1, snapshot.budget_bytes)
    return 1.0


def run_late(options: argparse.Namespace, shape: Shape, environ: dict[str, str]) -> int:
    """An engine that starts while its neighbour is at full load."""
    first, second = setups(shape, "kvtide", 2, host=options.cpu)
    with ExitStack() as stack:
        directory = stack.enter_context(ledgers())
        until = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "enough"
        environ = {**environ, "KVTIDE_DIR": str(directory)}
        held_bytes = 0 if options.cpu else stack.enter_context(ballast(shape.late_leave_bytes))
        memory = stack.enter_context(Memory(directory))
        a = stack.enter_context(Running(first, **environ))
        alone = a.wait_result()
        at_once, prompt, output = shape.late_load
        place = a.tell("load", str(until), at_once, [prompt], output, 7, options.seconds)
        deadline = time.monotonic() + options.fill_seconds
        while (free := free_share(directory)) > 0.05 and time.monotonic() < deadline:
            time.sleep(0.05)
        b_began = time.monotonic()
        b = stack.enter_context(Running(second, **environ))
        beside = b.wait_result()
        b_ready = time.monotonic()
        answer = b.wait_result(b.tell("burst", "beside", *shape.late_burst, 8), BURST_SECONDS)
        until.touch()
        loaded = a.wait_result(place)
        a.close()
        b.close()
        seen = memory.stop()
    requests = shape.late_burst[0]
    wrong = {
        "blocks": beside["blocks"] != alone["blocks"],
        "requests of a": loaded["failed"] > 0,
        "requests of b": answer["complete"] != requests,
        "load ended before b was done": loaded["seconds"] >= options.seconds,
        "nobody looked at the ledger": not seen["samples"],
    }
    results = {
        "held_outside_bytes": held_bytes,
        "free_share_when_b_started": round(free, 3),
        "alone": alone,
        "beside": beside,
        "b_start_seconds": round(b_ready - b_began, 1),
        "b_began": round(b_began, 3),
        "b_ready": round(b_ready, 3),
        "load": loaded,
        "burst": answer,
        "wrong": wrong,
        "memory": seen,
    }
    save("late_start", results)
    print("load of a", without_log(loaded), flush=True)
    print("burst of b", without_log(answer), flush=True)
    table(
        [
            ["engine", "started", "blocks", "start s", "answered", "failed"],
            ["a", "alone", alone["blocks"], alone["start_s"], loaded["finished"], loaded["failed"]],
            [
                "b",
                f"beside, {free:.0%} free",
                beside["blocks"],
                beside["start_s"],
                answer["complete"],
                requests - answer["complete"],
            ],
        ]
    )
    print(
        "; ".join(what for what, is_so in wrong.items() if is_so) or "as it should be", flush=True
    )
    return 1 if any(wrong.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 3], choices=[1, 2, 3])
    parser.add_argument("--systems", nargs="+", default=["native", "kvtide", "kvcached"])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each engine")
    parser.add_argument("--budget", type=parse_size, help="KV cache of all engines together")
    parser.add_argument("--together", action="store_true", help="all systems are up at once")
    parser.add_argument("--after", type=Path, help="begin to measure once this file is there")
    parser.add_argument("--late", action="store_true", help="the start beside a full load instead")
    parser.add_argument("--seconds", type=float, default=180, help="most that the load lasts")
    parser.add_argument(
        "--fill-seconds", type=float, default=25, help="most to wait till it is full"
    )
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    shape = ON_HOST if options.cpu else ON_GPU
    if options.budget is not None:
        shape = shape._replace(budget_bytes=options.budget)
    environ = host_environ(shape.budget_bytes if options.late else 4 * shape.budget_bytes)
    run = run_late if options.late else run_bursts
    return run(options, shape, environ if options.cpu else {})


if __name__ == "__main__":
    sys.exit(main())
