"""Tokens under kvtide against native vLLM on one GPU: several models, graphs and eager.

    python bench/gpu/tokens.py [MODEL ...]        (dense, window, 8b)

With `--together` both engines run at the same time, and models can be run beside each other:
faster, and the figures of device memory mean nothing. The model with sliding windows runs eagerly:
compiled, native itself has two variants of its tokens from one process to the next
(results/h200/window.json).

Engines are in-process, so that batches are the same in both. The last row of each model is the
negative control: with the KV cache zeroed before each step tokens must differ.
"""

from __future__ import annotations

import sys
from typing import Any

from drive import Running, save

from kvtide.units import GIB

PHASES: dict[str, list[list[Any]]] = {
    "dense": [["generate", "a", 64, 512, 64, 1], ["generate", "b", 96, 300, 48, 2]],
    "window": [["generate", "a", 64, 512, 64, 1], ["generate", "b", 32, 1500, 32, 2]],
    "8b": [["generate", "a", 64, 512, 64, 1], ["generate", "b", 64, 1024, 32, 2]],
}
# With `--together`: what a native engine has, of the device and as KV cache.
SHARES = {"dense": (0.1, 6), "window": (0.1, 6), "8b": (0.25, 12)}


def run_both(
    setup: dict[str, Any], commands: list[list[list[Any]]], *, together: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not together:
        native = Running({**setup, "system": "native"}, commands[0])
        native.finish()
        elastic = Running({**setup, "system": "kvtide"}, commands[1])
        return native.finish(), elastic.finish()
    share, kv_gib = SHARES[setup["model"]]
    setup = {**setup, "utilization": share}
    # A size of its own: a native engine's profile does not bear neighbours who free memory.
    native = Running({**setup, "system": "native", "kv_bytes": kv_gib * GIB}, commands[0])
    # What the first one has compiled the second one uses: two that compile at once tune their
    # kernels apart, and give different tokens.
    native.wait_result()
    elastic = Running({**setup, "system": "kvtide"}, commands[1])
    return native.finish(), elastic.finish()


def main() -> int:
    together = "--together" in sys.argv
    models = [a for a in sys.argv[1:] if a != "--together"] or list(PHASES)
    results: dict[str, Any] = {}
    failed = 0
    for model in models:
        phases = PHASES[model]
        setup = {"model": model, "eager": model == "window", "utilization": 0.4}
        commands: list[list[list[Any]]] = [
            [*phases, ["reset"], phases[0]],
            [
                ["figures"],
                *phases,
                ["figures"],
                ["reset"],
                ["figures"],
                phases[0],
                ["idle", 2.0],
                ["reset"],
                ["figures"],
                ["zeroing", True],
                phases[0],
                ["zeroing", False],
            ],
        ]
        native, elastic = run_both(setup, commands, together=together)
        results[model] = {"native": native, "kvtide": elastic}
        reference = [r for r in native if r["command"] == "generate"]
        ours = [r for r in elastic if r["command"] == "generate"]
        for number, result in enumerate(ours):
            control = number == len(ours) - 1
            expected = reference[0] if control else reference[number]
            same = sum(a == b for a, b in zip(result["digests"], expected["digests"], strict=True))
            total = len(result["digests"])
            good = same < total // 4 if control else same == total
            failed += not good
            print(
                f"{model:8} {'control' if control else result['name']:8} {same:3} of {total:3} "
                f"distinct {result['distinct']:3}  {'ok' if good else 'FAILED'}  "
                f"tok/s {result['tokens_per_s']:8} native {expected['tokens_per_s']:8}",
                flush=True,
            )
        for name, lines in (("native", native), ("kvtide", elastic)):
            for line in lines:
                if line["command"] in ("started", "reset", "figures", "idle", "ended"):
                    line = {k: v for k, v in line.items() if k != "log"}
                    print(f"{model:8} {name:8} {line}", flush=True)
        failed += len(ours) != len(phases) + 2
    save("tokens-" + "-".join(models), results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
