"""How many tokens the 8B shape gets, native against kvtide, and whether kvtide can stand by it.

    python bench/gpu/capacity.py [--seconds 120]
    python bench/gpu/capacity.py --cpu                              tiny, without a GPU

Native has `gpu_memory_utilization` 0.9: it promises a tenth of the device to others. The load is
more requests than fit, prompts of up to the longest, batches of up to the largest, and every sixth
request wants logprobs of its prompt, which takes logits for each of its tokens. Three engines, one
after the other, each under that load:

- native, briefly: what of the tenth it really leaves;
- kvtide with the same tenth (`KVTIDE_MARGIN`), briefly, sized once its graphs are captured;
- kvtide with the margin by which it leaves as much as native left, for `--seconds`.

Some 25 seconds a start. With `--seconds 0` only the capacities of the first two are read.

Ends with 1 where an engine died, a request failed, torch ran out of memory, or the last one has no
more tokens than native, or left less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from drive import EngineEndedError, Memory, Running, host_environ, ledgers, save, table, without_log

from kvtide.sizing.capacity import fraction_of
from kvtide.units import MIB

UTILIZATION = 0.9
AS_MUCH_LEFT = "kvtide, as much left"
ENGINES = ("native", "kvtide", AS_MUCH_LEFT)
SPARE_MIB = 32  # more than native left: two loads never end at the same MiB
LOG_LINES = 40
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


def show(results: dict[str, Any]) -> None:
    names = [name for name in ENGINES if name in results]
    native = results["native"]
    rows: list[list[object]] = [["", *names]]

    def row(head: str, of: Callable[[dict[str, Any]], object]) -> None:
        rows.append([head, *(of(results[name]) for name in names)])

    row("tokens", lambda one: one["tokens"])
    row("to native", lambda one: round(one["tokens"] / native["tokens"], 4))
    row("promised to others, MiB", lambda one: one["margin_bytes"] // MIB)
    row("free after the start, MiB", lambda one: free_mib(one["started"]))
    row("start, s", lambda one: one["started"]["start_s"])
    if "load" in native:
        row("left to others at the least, MiB", lambda one: one["load"]["lowest_free_mib"])
        for name in LOAD_FIGURES:
            rows.append([name, *(results[engine]["load"][name] for engine in names)])
        row("out of memory, retries", lambda one: [*one["load"]["torch"].values()][:2])
    table(rows)


def free_mib(started: dict[str, Any]) -> int:
    return int(started["total_bytes"] // MIB - started["used_mib"])


def run(
    setup: dict[str, Any], environ: dict[str, str], load: list[Any], seconds: float
) -> dict[str, Any]:
    """One engine, started, loaded and ended; where it died the reason is in `error`."""
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(ledgers())
        elastic = setup["system"] == "kvtide"
        memory = stack.enter_context(Memory(directory)) if elastic else None
        engine = stack.enter_context(Running(setup, KVTIDE_DIR=str(directory), **environ))
        try:
            started = engine.wait_result()
            result |= {"started": started, "tokens": started["tokens"]}
            if elastic:
                result["ceiling"] = engine.ask("ceiling")
                result["tokens"] = result["ceiling"]["tokens"]
            if seconds:
                result["load"] = engine.ask("load", NO_FILE, *load, seconds, LOGPROBS_EVERY)
                result["figures"] = engine.ask("figures")
            engine.close()
        except EngineEndedError as error:
            result["error"] = str(error)
        result["log"] = [line for line in engine.log if "kvtide:" in line][:LOG_LINES]
        if memory is not None:
            result["memory"] = memory.stop()
    return result


def faults(name: str, result: dict[str, Any]) -> list[str]:
    """What must not be of one engine. A brief load may end before its first answers."""
    found = [result["error"]] if "error" in result else []
    load = result.get("load", {})
    if load.get("failed"):
        found.append(f"{name}: requests failed")
    if load.get("torch", {}).get("num_ooms"):
        found.append(f"{name}: torch ran out of memory")
    if result.get("memory", {}).get("samples_above_budget"):
        found.append(f"{name}: charges above the budget")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="of the last load")
    parser.add_argument("--brief-seconds", type=float, default=30, help="of the other two")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    longest = 512 if options.cpu else 8192
    batch = 16 if options.cpu else 256
    output = longest // 64
    # Long ones fill the cache, short ones the batch.
    prompts = [longest - output, longest // 16, longest - output, longest // 16, longest // 16]
    load: list[Any] = [batch + batch // 4, prompts, output, 5]
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
    brief_seconds = min(options.brief_seconds, options.seconds)
    results: dict[str, Any] = {"utilization": UTILIZATION}
    wrong: list[str] = []

    def done(name: str, one: dict[str, Any], margin_bytes: int) -> None:
        results[name] = {"margin_bytes": margin_bytes, **one}
        wrong.extend(faults(name, one))
        print(name, one.get("tokens"), without_log(one.get("load", {})), flush=True)
        save("capacity", results)

    native = run(native_setup, environ, load, brief_seconds)
    if "started" not in native:
        print(native["error"], flush=True)
        return 1
    total_bytes = 64 * MIB if options.cpu else native["started"]["total_bytes"]
    margin_bytes = total_bytes - fraction_of(total_bytes, UTILIZATION)
    done("native", native, margin_bytes)
    elastic_setup = {**setup, "system": "kvtide"}
    environ["KVTIDE_MARGIN"] = str(margin_bytes)
    brief = run(elastic_setup, environ, load, brief_seconds)
    done("kvtide", brief, margin_bytes)
    if "load" in native and "load" in brief:
        more_mib = brief["load"]["lowest_free_mib"] - native["load"]["lowest_free_mib"]
        margin_bytes -= 0 if options.cpu else (more_mib - SPARE_MIB) * MIB
        environ["KVTIDE_MARGIN"] = str(margin_bytes)
        last = run(elastic_setup, environ, load, options.seconds)
        done(AS_MUCH_LEFT, last, margin_bytes)
        if "load" in last and not options.cpu:
            if last["tokens"] <= native["tokens"]:
                wrong.append("no more tokens than native")
            if not last["load"]["finished"]:
                wrong.append("nothing was answered")
            if last["load"]["lowest_free_mib"] < native["load"]["lowest_free_mib"]:
                wrong.append("less was left than native left")
    if not any("error" in results[name] for name in ENGINES if name in results):
        show(results)
    print("; ".join(wrong) or "as it should be", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
