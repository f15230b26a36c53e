"""A growth of 64 extents on 2, 4 and 8 ranks, against the slowest rank's own time for it.

    python bench/ranks.py

Ranks are processes with real sockets and a real ledger. Their device sleeps a fixed time a call
instead of working, so that two cores are enough for eight of them. Times are from the decision to
grow until the blocks are in circulation: planning, grants for all ranks, the step's message, the
ranks' calls, their answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from kvtide.bench.machine import machine
from kvtide.ledger import DeviceSpec, Ledger
from kvtide.pool import Pool, Run
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.ranks import Ranks
from kvtide.ranks.seat import Seat
from kvtide.units import GIB, MIB
from paper_device import GRANULE
from rank_process import Conduct, RankProcess
from ranks_world import Blocks, layers

EXTENTS = 64
_POLL_SECONDS = 50e-6


def measure(count: int, call_seconds: float, repeats: int, directory: Path) -> dict[str, Any]:
    """So many growths over so many ranks."""
    uuid = f"bench-{count}"
    ledger = Ledger.open(directory, DeviceSpec(uuid, "host", "bench", 64 * GIB, 0, None, GRANULE))
    instance = ledger.register("bench", explicit=True)
    blocks = EXTENTS + 10
    conduct = Conduct(call_seconds=call_seconds, blocks=blocks, paper=True, tells=True)
    processes = [RankProcess(ledger, instance.key, rank, conduct) for rank in range(count)]
    ranks = Ranks([process.member(ledger) for process in processes])
    circulation = Blocks(blocks)
    memory = GrowingMemory(
        {uuid: Seat(ledger, instance)},
        ranks,
        Pool([layers(blocks, GRANULE, 1)], 2 * MIB),
        circulation,
        2 * MIB,
    )
    memory.adopt([[Run(0, 1)]])

    def step() -> list[float]:
        message = ranks.message()
        assert message is not None
        for process in processes:
            process.step(message)
        while memory.pending:
            time.sleep(_POLL_SECONDS)
            memory.settle()
        return [process.told() for process in processes]

    growths, shrinks = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        assert memory.grow_for(EXTENTS, EXTENTS)
        own = step()
        growths.append((time.perf_counter() - started, max(own)))
        assert circulation.free.count == EXTENTS
        sent = [process.messages for process in processes]
        started = time.perf_counter()
        assert memory.trim()
        own = step()
        shrinks.append((time.perf_counter() - started, max(own)))
        assert [p.messages - before for p, before in zip(processes, sent, strict=True)] == [
            1
        ] * count
    messages = [process.messages for process in processes]
    for process in processes:
        process.close()
    memory.close()
    instance.close()
    ledger.close()
    return {
        "ranks": count,
        "extents": EXTENTS,
        "device_seconds_a_call": call_seconds,
        "messages_a_rank_a_batch": max(messages) / (2 * repeats),
        "growth": _ratios(growths),
        "shrinkage": _ratios(shrinks),
    }


def _ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [all_of_it / slowest for all_of_it, slowest in pairs]
    return {
        "median_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in sorted(ratios)],
        "median_ms": round(statistics.median(t for t, _ in pairs) * 1e3, 3),
        "median_slowest_rank_ms": round(statistics.median(t for _, t in pairs) * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--call-ms", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/ranks.json")
    options = parser.parse_args()
    results = []
    for count in (2, 4, 8):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            found = measure(count, options.call_ms / 1e3, options.repeats, Path(directory))
        results.append(found)
        print(
            f"{count} ranks: growth {found['growth']['median_ratio']}, shrinkage "
            f"{found['shrinkage']['median_ratio']} of the slowest rank's own time; "
            f"{found['messages_a_rank_a_batch']} message a rank a batch"
        )
    options.out.write_text(
        json.dumps({"machine": machine(), "load": _load(), "results": results}, indent=1) + "\n"
    )


def _load() -> list[float]:
    return [float(x) for x in Path("/proc/loadavg").read_text().split()[:3]]


if __name__ == "__main__":
    main()
