"""What kvtide costs vLLM's scheduler: CPU time of a step, to vLLM's own scheduler.

    .venvs/vllm-0.30.0/bin/python bench/schedule.py --out bench/results/schedule.json

Both have the same load step by step in one process, a coin says who goes first; a stand-in answers
for the model, and kvtide's memory is only counted. There is enough of it, and after some steps the
prefix cache fills it. An engine whose GPU waits for its scheduler is slower by as much.

Ends with 1 where the two did not take the same steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide.bench.machine import machine
from paper_engine import BLOCK_BYTES, Configuration, Load

BLOCKS_A_REQUEST = 40


def microseconds(pairs: list[tuple[int, int]]) -> dict[str, float]:
    """Medians of the pairs, (native, kvtide) in nanoseconds, and of their differences."""
    native, elastic, more = (
        sorted(values)[len(values) // 2] / 1e3
        for values in (*zip(*pairs, strict=True), [e - n for n, e in pairs])
    )
    return {
        "steps": len(pairs),
        "native_us": round(native, 1),
        "kvtide_us": round(elastic, 1),
        "more_us": round(more, 1),
    }


def measure(steps: int, running: int, seed: int) -> dict[str, Any]:
    """So many pairs of steps."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        blocks = BLOCKS_A_REQUEST * running
        configuration = Configuration(directory, blocks, sequences=running, ahead=True)
        elastic = configuration.elastic(stack, directory / "ledgers", (blocks + 64) * BLOCK_BYTES)
        native, mine = loads = [
            Load(scheduler, running, seed) for scheduler in (configuration.native(), elastic)
        ]
        dice = random.Random(seed)
        pairs: dict[str, list[tuple[int, int]]] = {"decoding": [], "with prompts": []}
        different = 0
        for number in range(300 + steps):
            took = {}
            for load in loads if dice.random() < 0.5 else reversed(loads):
                took[load] = load.step()
            different += native.scheduled != mine.scheduled
            if number >= 300:
                kind = "decoding" if set(native.scheduled.values()) == {1} else "with prompts"
                pairs[kind].append((took[native], took[mine]))
        return {
            "running": running,
            "steps_that_differ": different,
            **{kind: microseconds(of) for kind, of in pairs.items()},
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print("seed", given.seed)
    found = []
    for running in given.running:
        found.append(measure(given.steps, running, given.seed))
        print(found[-1], flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": machine(), "steps": found}, indent=1) + "\n")
    return int(any(one["steps_that_differ"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
