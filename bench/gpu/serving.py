"""Tokens a second of the 8B shape: native, kvtide and kvcached in turns, all resident on one GPU.

    python bench/gpu/serving.py [--pairs 5] [--kvcached-rounds 2]

Phases: 128 requests of (512, 128); after a reset of the prefix cache; 256 of (2048, 64).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from drive import Running, save

PHASES = [("short", 128, 512, 128), ("long", 256, 2048, 64)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kvcached-rounds", type=int, default=2)
    options = parser.parse_args()
    setup = {"model": "8b", "utilization": 0.4, "max_num_seqs": 256}
    engines = {
        "native": Running({**setup, "system": "native"}),
        "kvtide": Running({**setup, "system": "kvtide"}),
    }
    if options.kvcached_rounds:
        engines["kvcached"] = Running({**setup, "system": "kvcached", "runner": 1})
    for name, engine in engines.items():
        print(name, engine.wait_result(), flush=True)
    for engine in engines.values():  # the first pass compiles what is left
        engine.ask("generate", "warm", 64, 512, 32, 99)
        engine.ask("reset")
    rates: dict[str, dict[str, list[float]]] = {n: {} for n in engines}
    for round_ in range(options.pairs):
        for number, (phase, requests, prompt, output) in enumerate(PHASES):
            again = (False, True) if phase == "short" else (False,)
            for repeated in again:
                label = f"{phase}, after reset" if repeated else phase
                order = list(engines) if round_ % 2 == 0 else list(reversed(engines))
                for name in order:
                    if name == "kvcached" and round_ >= options.kvcached_rounds:
                        continue
                    seed = 100 * round_ + 10 * number + repeated
                    result = engines[name].ask("generate", label, requests, prompt, output, seed)
                    rates[name].setdefault(label, []).append(result["tokens_per_s"])
                    engines[name].ask("reset")
    table: dict[str, Any] = {}
    for label in rates["native"]:
        native, ours = rates["native"][label], rates["kvtide"][label]
        ratios = sorted(k / n for k, n in zip(ours, native, strict=True))
        table[label] = {
            "native_tokens_per_s": statistics.median(native),
            "kvtide_tokens_per_s": statistics.median(ours),
            "kvcached_tokens_per_s": statistics.median(rates["kvcached"][label])
            if rates.get("kvcached", {}).get(label)
            else None,
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_min": round(ratios[0], 4),
            "ratio_max": round(ratios[-1], 4),
        }
        print(label, table[label], flush=True)
    for name in ("kvtide",):
        print(name, engines[name].ask("figures"), flush=True)
    for engine in engines.values():
        engine.close()
    save("serving", {"table": table, "tokens_per_s": rates})
    return 0


if __name__ == "__main__":
    sys.exit(main())
