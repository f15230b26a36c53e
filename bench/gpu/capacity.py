"""How many tokens the 8B shape gets, native against kvtide, and whether kvtide can stand by it.

    python bench/gpu/capacity.py [--seconds 120]
    python bench/gpu/capacity.py --cpu                              tiny, without a GPU

Native has `gpu_memory_utilization` 0.9: a tenth of the device is left to others. kvtide leaves the
same tenth (`KVTIDE_MARGIN`), and is sized once its graphs are captured. Then kvtide is loaded with
more requests than fit, prompts of up to the longest, batches of up to the largest, and every sixth
request wants logprobs of its prompt, which takes logits for each of its tokens. Some 70 seconds for
two starts, native first, and the load. With `--seconds 0` only the capacities are read.

Ends with 1 where an engine died, a request failed, torch ran out of memory, or kvtide has no more
tokens than native.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from drive import EngineEndedError, Memory, Running, host_environ, ledgers, save, table

from kvtide.sizing.capacity import fraction_of
from kvtide.units import MIB

UTILIZATION = 0.9
LOGPROBS_EVERY = 6
LOAD_FIGURES = (
    "seconds",
    "finished",
    "failed",
    "with_prompt_logprobs",
    "preemptions",
    "most_running",
)
NO_FILE = "/nonexistent"  # the load ends by its time alone


def show(results: dict[str, Any], margin_bytes: int) -> None:
    native, elastic, ceiling = (results[name] for name in ("native", "kvtide", "ceiling"))
    rows: list[list[object]] = [
        ["", "native", "kvtide"],
        ["tokens", native["tokens"], ceiling["tokens"]],
        ["to native", 1, round(ceiling["tokens"] / native["tokens"], 4)],
        ["left to others, MiB", margin_bytes // MIB, ceiling["margin_mib"]],
        ["free after the start, MiB", *(free_mib(told) for told in (native, elastic))],
        ["own, headroom, MiB", "", f"{ceiling['own_mib']}, {ceiling['headroom_mib']}"],
        ["start, s", native["start_s"], elastic["start_s"]],
    ]
    if "load" in results:
        load = results["load"]
        charged = int(results["memory"]["high_water_mib"] * MIB) // ceiling["block_bytes"]
        books = load["torch"]
        rows += [
            ["blocks charged, used at the most", "", f"{charged}, {load['most_used_blocks']}"],
            ["blocks it may hold", "", ceiling["blocks"]],
            ["free at the least, MiB", "", load["lowest_free_mib"]],
            *([name, "", load[name]] for name in LOAD_FIGURES),
            ["out of memory, retries of torch", "", [*books.values()][:2]],
        ]
    table(rows)


def free_mib(started: dict[str, Any]) -> int:
    return int(started["total_bytes"] // MIB - started["used_mib"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="of load")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    longest = 512 if options.cpu else 8192
    batch = 16 if options.cpu else 256
    output = longest // 64
    # Long ones fill the cache, short ones the batch.
    prompts = [longest - output, longest // 16, longest - output, longest // 16, longest // 16]
    setup: dict[str, Any] = {
        "model": "tiny" if options.cpu else "8b",
        "max_num_seqs": batch,
        "max_model_len": longest,
        "utilization": UTILIZATION,
        "cpu": options.cpu,
    }
    environ = host_environ(64 * MIB) if options.cpu else {}
    native_setup = {**setup, "system": "native"}
    if options.cpu:
        native_setup["kv_bytes"] = fraction_of(64 * MIB, UTILIZATION)
    with Running(native_setup, **environ) as engine:
        native = engine.wait_result()
        engine.close()
    total_bytes = 64 * MIB if options.cpu else native["total_bytes"]
    margin_bytes = total_bytes - fraction_of(total_bytes, UTILIZATION)
    results: dict[str, Any] = {"utilization": UTILIZATION, "native": native}
    wrong = []
    with ExitStack() as stack:
        directory = stack.enter_context(ledgers())
        environ |= {"KVTIDE_DIR": str(directory), "KVTIDE_MARGIN": str(margin_bytes)}
        memory = stack.enter_context(Memory(directory))
        elastic = stack.enter_context(Running({**setup, "system": "kvtide"}, **environ))
        try:
            results["kvtide"] = elastic.wait_result()
            results["ceiling"] = elastic.ask("ceiling")
            save("capacity", results)
            if options.seconds:
                results["load"] = elastic.ask(
                    *("load", NO_FILE, batch + batch // 4, prompts, output, 5),
                    *(options.seconds, LOGPROBS_EVERY),
                )
                results["figures"] = elastic.ask("figures")
            elastic.close()
        except EngineEndedError as error:
            wrong.append(str(error))
        results["log"] = [line for line in elastic.log if "kvtide:" in line]
        results["memory"] = memory.stop()
    save("capacity", results)
    if wrong:
        print(*wrong, sep="\n", flush=True)
        return 1
    show(results, margin_bytes)
    load = results.get("load", {})
    if results["ceiling"]["tokens"] <= native["tokens"] and not options.cpu:
        wrong.append("no more tokens than native")
    if load.get("failed") or (options.seconds and not load.get("finished")):
        wrong.append("requests failed")
    if load.get("torch", {}).get("num_ooms"):
        wrong.append("torch ran out of memory")
    if results["memory"]["samples_above_budget"]:
        wrong.append("charges above the budget")
    print("; ".join(wrong) or "as it should be", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
