"""Tokens a second of the 8B shape: native, kvtide and kvcached in turns, all resident on one GPU.

    python bench/gpu/serving.py [--rounds 5] [--kvcached-rounds 2] [--seconds 330]
    python bench/gpu/serving.py --cpu                               tiny, without a GPU

Phases: 128 requests of (512, 128); the same shape after a reset of the prefix cache; 256 of
(2048, 64). Each engine may hold the same KV cache, native as its own, kvtide as `KVTIDE_BUDGET`;
with `--per-layer` a second kvtide, with a ledger of its own, lays its cache out as native does.
One is asked at a time, and they swap who goes first. Some 60 to 90 seconds until all are up, then
35 a round; results are saved after each, and no round begins that may not end within `--seconds`.

Ends with 1 where native or kvtide died, or no round was whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drive import (
    EngineEndedError,
    Running,
    has_kvcached,
    host_environ,
    ledgers,
    save,
    table,
    wait_for_file,
    without_log,
)

from kvtide.bench.pairs import paired_ratios
from kvtide.units import GIB, MIB, parse_size

BAR = 0.995
PER_LAYER = "kvtide, per layer"
PHASES = [
    ("short", 128, 512, 128),
    ("short, after reset", 128, 512, 128),
    ("long", 256, 2048, 64),
]
HOST_PHASES = [("short", 8, 64, 16), ("short, after reset", 8, 64, 16), ("long", 8, 128, 8)]

Rates = dict[str, dict[str, list[float]]]


def one_round(
    engines: dict[str, Running],
    names: list[str],
    round_: int,
    same: dict[str, list[int]],
    paces: list[dict[str, Any]],
    *,
    phases: list[tuple[str, int, int, int]],
) -> Rates:
    """Tokens a second of each engine in each phase; into `same` how many answers are native's,
    into `paces` what its steps were."""
    rates: Rates = {name: {} for name in names}
    for number, (phase, requests, prompt, output) in enumerate(phases):
        digests: dict[str, list[str]] = {}
        for name in names if round_ % 2 == 0 else reversed(names):
            seed = 100 * round_ + 10 * number
            result = engines[name].ask("generate", phase, requests, prompt, output, seed)
            rates[name][phase] = [result["tokens_per_s"]]
            digests[name] = result.pop("digests")
            paces.append({"system": name, **result})
            engines[name].ask("reset")
        equal = sum(a == b for a, b in zip(digests["native"], digests["kvtide"], strict=True))
        same.setdefault(phase, []).append(equal)
    return rates


def ratios(rates: Rates) -> dict[str, dict[str, Any]]:
    """Of each phase all others to native, kvcached in the rounds that it had."""
    found: dict[str, dict[str, Any]] = {phase: {} for phase in rates["native"]}
    for phase, native in rates["native"].items():
        for name, phases in rates.items():
            if name != "native" and (other := phases.get(phase)):
                found[phase][name] = paired_ratios(other, native[: len(other)])
    return found


def show(rates: Rates) -> None:
    rows: list[list[object]] = [
        ["phase", "system", "rounds", "tokens/s", "to native", "min", "max"]
    ]
    missed = []
    for phase, systems in ratios(rates).items():
        for name in rates:
            values = sorted(rates[name].get(phase, []))
            if not values:
                continue
            row: list[object] = [phase, name, len(values), values[len(values) // 2]]
            ratio = systems.get(name)
            rows.append(row + ([*ratio.values()] if ratio else ["", "", ""]))
        if systems["kvtide"]["median"] < BAR:
            missed.append(phase)
    table(rows)
    print(
        f"kvtide at {BAR} of native or above: {'MISSED in ' * bool(missed)}"
        f"{', '.join(missed) or 'yes'}",
        flush=True,
    )


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", "--pairs", type=int, default=5)
    parser.add_argument("--long-rounds", type=int, help="the others are short; default: none is")
    parser.add_argument("--kvcached-rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=330, help="of all, the starts included")
    parser.add_argument("--kv", type=parse_size, default=40 * GIB, help="most KV cache of each")
    parser.add_argument("--per-layer", action="store_true", help="a second kvtide, laid out so")
    parser.add_argument("--after", type=Path, help="begin to measure once this file is there")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    kv_bytes = 64 * MIB if options.cpu else options.kv
    setup: dict[str, Any] = {
        "model": "tiny" if options.cpu else "8b",
        "utilization": 0.3,
        "max_num_seqs": 256,
        "max_model_len": 512 if options.cpu else 8192,
        "cpu": options.cpu,
    }
    setups = {
        "native": {**setup, "system": "native", "kv_bytes": kv_bytes},
        "kvtide": {**setup, "system": "kvtide"},
    }
    if options.per_layer:
        setups[PER_LAYER] = {**setup, "system": "kvtide", "layout": "per-layer"}
    if options.kvcached_rounds and has_kvcached():
        setups["kvcached"] = {**setup, "system": "kvcached", "runner": 1, "kv_bytes": kv_bytes}
    rates: Rates = {name: {} for name in setups}
    same: dict[str, list[int]] = {}
    paces: list[dict[str, Any]] = []
    results: dict[str, Any] = {
        "kv_bytes": kv_bytes,
        "tokens_per_s": rates,
        "same_answers": same,
        "paces": paces,
    }
    status = 0
    with ExitStack() as stack:
        environ = {
            "KVTIDE_BUDGET": str(kv_bytes),
            **(host_environ() if options.cpu else {}),
        }
        engines: dict[str, Running] = {}
        for name, one in setups.items():
            directory = str(stack.enter_context(ledgers()))
            engines[name] = stack.enter_context(Running(one, KVTIDE_DIR=directory, **environ))
            if name == "native":
                # What it has compiled the others use: engines that compile at once tune kernels
                # apart, and are then not equally fast, nor equal in their tokens.
                engines[name].wait_result()
        for name in list(engines):
            try:
                started = engines[name].wait_result()
                results[f"{name} started"] = started
                print(name, without_log(started), flush=True)
            except EngineEndedError:
                if name != "kvcached":
                    raise
                del engines[name], rates[name]
        print("all are up", flush=True)
        wait_for_file(options.after)
        for name in list(engines):
            try:
                engines[name].ask("generate", "warm", 64, 64 if options.cpu else 512, 32, 99)
                engines[name].ask("reset")
            except EngineEndedError:
                if name != "kvcached":
                    raise
                del engines[name], rates[name]
        longest = 0.0
        for round_ in range(options.rounds):
            round_began = time.monotonic()
            if round_began + 1.2 * longest - began > options.seconds:
                print(f"{round_} rounds of {options.rounds}: no time for another", flush=True)
                break
            names = [n for n in engines if n != "kvcached" or round_ < options.kvcached_rounds]
            phases = HOST_PHASES if options.cpu else PHASES
            if options.long_rounds is not None and round_ >= options.long_rounds:
                phases = phases[:-1]
            try:
                found = one_round(engines, names, round_, same, paces, phases=phases)
            except EngineEndedError as error:
                print(error, flush=True)
                if all(engines[name].alive() for name in ("native", "kvtide")):
                    del engines["kvcached"]  # the others go on without it, from the next round on
                    continue
                status = 1
                break
            for name, told in found.items():
                for phase, values in told.items():
                    rates[name].setdefault(phase, []).extend(values)
            longest = max(longest, time.monotonic() - round_began)
            results["ratios"] = ratios(rates)
            save("serving", results)
            print(f"round {round_ + 1}, {time.monotonic() - began:.0f} s", found, flush=True)
        if status == 0:
            results["figures"] = engines["kvtide"].ask("figures")
            for engine in engines.values():
                engine.close()
    if "ratios" not in results:
        print("no round was whole", flush=True)
        return 1
    save("serving", results)
    show(rates)
    return status


if __name__ == "__main__":
    sys.exit(main())
