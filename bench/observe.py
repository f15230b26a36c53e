"""What observing costs an engine: CPU time of vLLM's scheduler, a step, with counters and without.

    .venvs/vllm-0.30.0/bin/python bench/observe.py --out bench/results/observe.json

Two of vLLM's own schedulers with kvtide's memory, which is only counted, have the same load step by
step in one process; a stand-in answers for the model. At each step a coin says in which of the two
counters, events and log lines are on, and another which goes first, so that all else is equal;
`kvtide record` looks at both all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide.bench.machine import machine
from kvtide.observe.tally import Cause, Kind, Owner, Tally, Verb
from kvtide.ranks.endpoint import endpoint_of
from kvtide.units import MIB
from paper_engine import Configuration, Load

BLOCKS, SEQUENCES = 1200, 64
DEVICE_BYTES = 192 * MIB
KEPT_SHARE = 0.98  # of the pairs, without those that differ most: the machine has other work


def _nothing(*_: object) -> None:
    """In place of counting."""


class Mute:
    """In place of a journal. What an engine evicts is added up all the same, to nobody's use."""

    evicted_blocks = 0
    note = evicted = count_soon = count_now = waits = resumes = close = staticmethod(_nothing)


class Switch:
    """Turns noting off and on. Objects are exchanged: a class that changes slows all calls."""

    def __init__(self, memory: Any, timed: Any) -> None:
        self._memory, self._timed = memory, timed
        self._journals = (Mute(), memory.journal)
        self._tells = (lambda _tally: timed._took.clear(), timed.tell)

    def set(self, on: bool) -> None:
        self._memory.journal = self._memory.changes.journal = self._journals[on]
        self._timed.tell = self._tells[on]


def _each_ns() -> dict[str, float]:
    """What one call costs, the best of many."""
    import timeit

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tally = Tally(Path(directory) / "a.ledger", Owner("engine", 0, 1))
        calls = {
            "count": lambda: tally.count(Kind.EVICT, Cause.ALLOCATION, 4096),
            "note": lambda: tally.note(Kind.GROW, Cause.NEED, 4096),
            "time": lambda: tally.time(Verb.MAP, 25_000),
            "nothing": lambda: _nothing(),
        }
        best = {k: min(timeit.repeat(f, number=1000, repeat=300)) * 1e6 for k, f in calls.items()}
        tally.close()
    return {k: round(ns - best["nothing"], 1) for k, ns in best.items() if k != "nothing"}


Pairs = list[tuple[int, int]]


def _kept(pairs: Pairs) -> Pairs:
    """Without those of which one was interrupted."""
    kept = sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return kept[: round(KEPT_SHARE * len(kept))]


def _ratio(pairs: Pairs) -> float:
    """Of all time with to all time without."""
    return sum(on for on, _ in pairs) / sum(off for _, off in pairs)


def _ratio_95(pairs: Pairs, dice: random.Random) -> list[float]:
    """95% of what resampling the pairs gives."""
    ratios = sorted(_ratio(dice.choices(pairs, k=len(pairs))) for _ in range(400))
    return [round(ratios[10], 5), round(ratios[-11], 5)]


class Observed:
    """One scheduler, its load, and the switch of what it notes."""

    def __init__(self, stack: ExitStack, directory: Path, running: int, seed: int) -> None:
        directory.mkdir()
        configuration = Configuration(directory, BLOCKS, sequences=SEQUENCES, ahead=False)
        scheduler = configuration.elastic(stack, directory / "ledgers", DEVICE_BYTES)
        self.load = Load(scheduler, running, seed)
        memory = scheduler.tide.memory
        endpoint = endpoint_of(memory.ranks.members[0].account.key)
        self.switch = Switch(memory, endpoint.memory._timed)
        self._tally = memory.journal._tallies[0][1]
        command = [sys.executable, "-c", "from kvtide.cli import main; main()", "record", "-o"]
        watching = subprocess.Popen(
            [*command, str(directory / "trace.json")],
            env=os.environ | {"KVTIDE_DIR": str(directory / "ledgers")},
            stdout=subprocess.DEVNULL,
        )
        stack.callback(watching.wait)
        stack.callback(watching.terminate)

    def noted(self) -> tuple[int, int]:
        """Events, and all that was counted."""
        return self._tally._head, sum(self._tally._counts[::2])


def measure(steps: int, running: int, seed: int) -> dict[str, Any]:
    """So many pairs of steps."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        both = [Observed(stack, directory / name, running, seed) for name in ("a", "b")]
        for _ in range(300):
            for one in both:
                one.load.step()
        dice = random.Random(seed)
        before = [one.noted() for one in both]
        pairs: Pairs = []
        for _ in range(steps):
            on = dice.randrange(2)
            order = (0, 1) if dice.random() < 0.5 else (1, 0)
            took = [0, 0]
            for i in order:
                both[i].switch.set(i == on)
                took[i] = both[i].load.step()
            pairs.append((took[on], took[1 - on]))
        events, counts = (
            sum(one.noted()[k] - was[k] for one, was in zip(both, before, strict=True))
            for k in range(2)
        )
        for one in both:
            one.switch.set(True)
        kept = _kept(pairs)
        return {
            "running": running,
            "pairs": steps,
            "events_a_step": round(events / steps, 3),
            "counted_a_step": round(counts / steps, 3),
            "step_us_on": round(sum(on for on, _ in kept) / len(kept) / 1e3, 2),
            "step_us_off": round(sum(off for _, off in kept) / len(kept) / 1e3, 2),
            "ratio": round(_ratio(kept), 5),
            "ratio_95": _ratio_95(kept, dice),
            "ratio_of_all": round(_ratio(pairs), 5),
            "on_us": [on // 1000 for on, _ in pairs],
            "off_us": [off // 1000 for _, off in pairs],
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print("seed", given.seed)
    figures = {
        "machine": machine(),
        "call_ns": _each_ns(),
        "steps": [measure(given.steps, running, given.seed) for running in (8, 32)],
    }
    for steps in figures["steps"]:
        print({k: v for k, v in steps.items() if k not in ("on_us", "off_us")})
    print(figures["call_ns"])
    if given.out is not None:
        given.out.write_text(json.dumps(figures) + "\n")
    return int(any(steps["ratio"] > 1.01 for steps in figures["steps"]))


if __name__ == "__main__":
    sys.exit(main())
