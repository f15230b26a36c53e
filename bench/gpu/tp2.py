"""One engine over several ranks: kvtide against native in interleaved pairs, and what goes wrong.

    python bench/gpu/tp2.py [--tp 2] [--pairs 5] [--second-native]
                                                         8B shape, on GPUs; 5 to 7 minutes
    python bench/gpu/tp2.py --tp 1                       on one
    python bench/gpu/tp2.py --cpu [--tp 2] [--pairs 2]   tiny, without one

Shown: tokens (where native equals itself), throughput in pairs, which processes hold a CUDA
context and what one costs, one device starved by a third process, and that a neighbour has the
memory of a server whose worker was killed. The growth of a batch is in `ranks.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from drive import save, wait_for_file
from engine import config_of
from strong import PROBE, site_of

from kvtide.bench.pairs import paired_ratios
from kvtide.bench.stream import closed_loop
from kvtide.ledger import Ledger
from kvtide.units import GIB, MIB
from kvtide.verify.client import Completion, complete, metric, random_prompts
from kvtide.verify.models import ensure_model
from kvtide.verify.servers import Server

NAME = "m"
HERE = Path(__file__).parent
READY_SECONDS = 300
STEPS = "vllm:iteration_tokens_total_count"

CONTEXT = """
import torch
free = torch.cuda.mem_get_info()[0]
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import torch; torch.zeros(1, device='cuda'); "
    "torch.cuda.empty_cache(); print('up', flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(free - torch.cuda.mem_get_info()[0])
child.communicate("\\n")
"""

HOLD = """
import sys, torch
device, leave = int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(device)
held = []
while torch.cuda.mem_get_info()[0] - leave > 64 << 20:
    free = torch.cuda.mem_get_info()[0] - leave
    held.append(torch.empty(min(free, 1 << 30), dtype=torch.uint8, device="cuda"))
print(torch.cuda.mem_get_info()[0], flush=True)
input()
"""


def made(name: str, directory: Path) -> Path:
    """A model of that shape without weights, with a tokenizer of one word a token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(name)))
    words = {f"w{number}": number for number in range(config_of(name)["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
    return directory


class Servers:
    """Native and kvtide servers of the same flags, and a small neighbour on their devices.

    The second native one, where asked for, shows how far two processes of one kind differ.
    """

    def __init__(self, options: argparse.Namespace, work: Path, ledgers: Path) -> None:
        self.options, self.work, self.ledgers = options, work, ledgers
        (work / "probe").mkdir()
        common = ["--served-model-name", NAME, "--tensor-parallel-size", str(options.tp)]
        # A single rank too is another process than the scheduler, as several are.
        common += ["--distributed-executor-backend", "mp"]
        environ = {PROBE: str(work / "probe")}
        elastic = {"KVTIDE": "1", "KVTIDE_DIR": str(ledgers)}
        if options.cpu:
            model = small = ensure_model("llama-wide", work / "models")
            common += ["--max-model-len", "2048", "--dtype", "float32"]
            self.kv_bytes = 96 * MIB
            elastic["KVTIDE_HOST_DEVICE"] = ",".join(
                f"{ledgers.name}-{rank}" for rank in range(options.tp)
            )
            elastic["KVTIDE_HOST_MEMORY"] = "128MiB"
            if options.tp > 1:
                environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join("01"[: options.tp])
        else:
            models = options.models or work
            model, small = made("8b", models / "8b"), made("dense", models / "dense")
            common += ["--max-model-len", "8192", "--dtype", "bfloat16", "--no-enforce-eager"]
            common += ["--load-format", "dummy", "--max-num-seqs", "128"]
            common += ["--gpu-memory-utilization", "0.2"]
            # FlashInfer's fused all-reduce uses NVLink multicast, which a shared host may not have.
            passes = {"pass_config": {"fuse_allreduce_rms": False}}
            common += ["--compilation-config", json.dumps(passes)]
            self.kv_bytes = 8 * GIB
            environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
            site = [str(site_of(work / "site")), str(HERE), os.environ.get("PYTHONPATH", "")]
            environ["PYTHONPATH"] = os.pathsep.join(site)
            elastic["KVTIDE_BUDGET"] = str(12 * GIB)
        common += ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        logs = work if options.logs is None else options.logs
        logs.mkdir(parents=True, exist_ok=True)

        def make(name: str, model: Path, more: dict[str, str]) -> Server:
            log = logs / f"{name}.log"
            return Server(model, log=log, arguments=common, environ={**environ, **more})

        natives = ["native", "second native"] if options.second_native else ["native"]
        self.compared = {name: make(name.replace(" ", "-"), model, {}) for name in natives}
        self.compared["kvtide"] = make("kvtide", model, {**elastic, "KVTIDE_NAME": "large"})
        self.native, self.elastic = self.compared["native"], self.compared["kvtide"]
        self.neighbour = make("neighbour", small, {**elastic, "KVTIDE_NAME": "neighbour"})
        self._compiling = [make("compiles", model, {}), make("compiles-small", small, {})]

    def start(self) -> None:
        """Two that compile one model at once tune their kernels apart, and differ in speed and
        tokens: so on GPUs others compile first, and end; all measured ones use what they left."""
        began = time.monotonic()
        batches = [[server] for server in self.compared.values()]
        if not self.options.cpu:
            measured = [*self.compared.values(), self.neighbour]
            batches = [] if self.options.compiled else [self._compiling]
            batches += [] if self.options.compile else [measured]
        for batch in batches:
            for server in batch:
                server.start()
            for server in batch:
                server.wait_ready(READY_SECONDS)
                print(f"{server.log.stem} up after {time.monotonic() - began:.0f} s", flush=True)
            if batch is self._compiling:
                self._end(batch)

    def stop(self) -> None:
        self._end([*self._compiling, *self.compared.values(), self.neighbour])

    def _end(self, servers: list[Server]) -> None:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers))


def tokens(url: str, seed: int) -> list[tuple[int, ...]]:
    """One at a time, so that batches do not depend on anything."""
    prompts = random_prompts(seed, 12, 300)
    return answered(complete(url, prompts, max_tokens=48, model=NAME, concurrency=1))


def answered(answers: list[Completion]) -> list[tuple[int, ...]]:
    assert all(a.error is None for a in answers), [a.error for a in answers if a.error][:3]
    return [a.tokens for a in answers]


def compare(servers: Servers) -> dict[str, Any]:
    """How many answers are the same; where two processes differ, from which token on."""

    def twice(server: Server) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        first = tokens(server.url, 1)
        # What is found in the prefix cache is computed in other batches, and rounds otherwise.
        server.drop_cache()
        return first, tokens(server.url, 1)

    first, again = twice(servers.native)
    sound = [n for n, (a, b) in enumerate(zip(first, again, strict=True)) if a == b]
    found: dict[str, Any] = {
        "native_equals_itself": len(sound),
        "of": len(first),
        "distinct": len(set(first)),
    }
    for name, server in servers.compared.items():
        if server is not servers.native:
            other, again = twice(server)
            places = [differs_from(other[n], first[n]) for n in sound]
            name = name.replace(" ", "_")
            found[f"{name}_equals_itself"] = sum(a == b for a, b in zip(other, again, strict=True))
            found[f"{name}_equals_native"] = places.count(None)
            found[f"{name}_differs_from_native_at"] = places
    return found


def differs_from(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """The first place at which two answers differ."""
    places = (n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return next(places, None)


def probe(servers: Servers) -> dict[str, Any]:
    """Which processes of the kvtide server hold a CUDA context, and what one costs."""
    directory = servers.work / "probe"
    (directory / "go").touch()
    time.sleep(2)
    told = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    found = {}
    for name, server in servers.compared.items():
        mine = set(server.pids())
        found[name] = {
            f"{one['name']} {one['pid']}": one["contexts"] for one in told if one["pid"] in mine
        }
    context = subprocess.run(
        [sys.executable, "-c", CONTEXT], capture_output=True, text=True, check=True
    )
    scheduler = [c for name, c in found["kvtide"].items() if "Engine" in name]
    assert len(scheduler) == 1, f"no one scheduler among {sorted(found['kvtide'])}"
    return {
        **found,
        "scheduler": scheduler[0],
        "context_mib": int(context.stdout.split()[-1]) / MIB,
    }


def measure(servers: Servers, pairs: int, load: tuple[int, int, int], *, streamed: bool) -> Any:
    """Tokens a second in rounds; who goes first changes. Of answers that come as a whole the
    engine is the slowest part, of streamed ones it may be the front end, as it is for users."""
    requests, prompt, output = load
    names = list(servers.compared)
    rates: dict[str, list[float]] = {name: [] for name in names}
    rounds: list[dict[str, Any]] = []
    for round_ in range(pairs + 1):
        start = round_ % len(names)
        for name in names[start:] + names[:start]:
            server = servers.compared[name]
            prompts = random_prompts(1000 + round_, requests, prompt)
            before, told = metric(server.url, STEPS), {}
            if streamed:
                seconds, timings = closed_loop(server.url, NAME, prompts, output, 128)
                assert all(t.error is None for t in timings)
                firsts = sorted(t.ttft_seconds * 1e3 for t in timings)
                told = {"first_ttft_ms": firsts[0], "last_ttft_ms": firsts[-1]}
            else:
                began = time.monotonic()
                answers = complete(
                    server.url, prompts, max_tokens=output, model=NAME, concurrency=128
                )
                seconds = time.monotonic() - began
                answered(answers)
            if round_:  # the first one warms up
                rates[name].append(round(requests * output / seconds, 1))
                told = {key: round(value, 1) for key, value in told.items()}
                steps = round(metric(server.url, STEPS) - before)
                rounds.append({"round": round_, "server": name, "steps": steps, **told})
            server.drop_cache()
    return {
        "requests": [requests, prompt, output],
        "tokens_per_s": rates,
        "to_native": {
            name: paired_ratios(rates[name], rates["native"]) for name in names if name != "native"
        },
        "rounds": rounds,
    }


def held(ledgers: Path) -> dict[str, dict[str, int]]:
    """Bytes charged on each device, by instance."""
    charged = {}
    for path in Ledger.existing(ledgers):
        with Ledger.read(path) as observer:
            found = observer.snapshot().instances
            charged[path.name] = {one.name: one.charged_bytes for one in found}
    return charged


def starve(servers: Servers) -> dict[str, Any]:
    """Take most of the last rank's device from outside; all ranks must agree, requests go on."""
    options = servers.options
    if options.cpu:
        last = f"{servers.ledgers.name}-{options.tp - 1}"
        command = [sys.executable, "-m", "kvtide.device.ballast", "88MiB"]
        command += ["--total", "128MiB", "--uuid", last]
    else:
        command = [sys.executable, "-c", HOLD, str(options.tp - 1), str(4 * GIB)]
    ballast = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert ballast.stdout is not None
        said = ballast.stdout.readline().split()
        assert said, "the ballast ended"
        prompts = random_prompts(77, 32, 700) if options.cpu else random_prompts(77, 96, 2000)
        started = time.monotonic()
        answers = complete(
            servers.elastic.url, prompts, max_tokens=32, model=NAME, concurrency=len(prompts)
        )
        seconds = time.monotonic() - started
        charged = held(servers.ledgers)
    finally:
        ballast.kill()
        ballast.wait()
    mine = {device: of["large"] for device, of in charged.items()}
    return {
        "requests": len(answers),
        "failed": sum(a.error is not None for a in answers),
        "seconds": round(seconds, 1),
        "charged_mib": {device: size / MIB for device, size in mine.items()},
        "in_step": len(set(mine.values())) == 1 and len(mine) == options.tp,
        "ballast": said,
    }


def name_of(pid: int) -> str:
    """As the kernel has it, cut to 15 letters."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def kill_worker(servers: Servers) -> dict[str, Any]:
    """Kill one worker of a server that holds most of the budget; its neighbour gets it all."""
    tp, cpu = servers.options.tp, servers.options.cpu
    large = random_prompts(5, 24, 700) if cpu else random_prompts(5, 160, 1500)
    answered(complete(servers.elastic.url, large, max_tokens=8, model=NAME, concurrency=64))
    before = held(servers.ledgers)
    victim = next(p for p in servers.elastic.pids() if "Worker" in name_of(p))
    start = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while servers.elastic.pids() and time.monotonic() - start < 30:
        time.sleep(0.01)
    gone = time.monotonic() - start
    prompts = random_prompts(6, 24, 900) if cpu else random_prompts(6, 160, 6000)
    # So long that they run all at once and need it: a prefix cache alone makes do with less.
    answers = complete(
        servers.neighbour.url, prompts, max_tokens=256, model=NAME, concurrency=len(prompts)
    )
    after = held(servers.ledgers)
    most = {}
    for path in Ledger.existing(servers.ledgers):
        with Ledger.read(path) as observer:
            most[path.name] = observer.snapshot().spec.ceiling_bytes
    return {
        "gone_seconds": round(gone, 3),
        "before_mib": {d: {n: b / MIB for n, b in of.items()} for d, of in before.items()},
        "after_mib": {d: {n: b / MIB for n, b in of.items()} for d, of in after.items()},
        "neighbour_failed": sum(a.error is not None for a in answers),
        # More than was left beside the one that was killed, on every device.
        "neighbour_has_it": len(after) == tp
        and all(
            of["neighbour"] > most[d] - before[d]["large"] and "large" not in of
            for d, of in after.items()
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--second-native", action="store_true", help="how far do two native servers differ?"
    )
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--compile", action="store_true", help="fill vLLM's cache, and end")
    once.add_argument("--compiled", action="store_true", help="all is in vLLM's cache already")
    parser.add_argument("--models", type=Path, help="where they lie: vLLM's cache goes by it")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--after", type=Path, help="begin to measure once this file is there")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    options = parser.parse_args()
    if (options.compile or options.compiled) and options.models is None:
        parser.error("--compile and --compiled need --models: vLLM's cache goes by the path")
    work = Path(tempfile.mkdtemp(prefix="kvtide-tp-"))
    ledgers = Path(tempfile.mkdtemp(prefix="kvtide-tp-", dir="/dev/shm"))
    servers = Servers(options, work, ledgers)
    results: dict[str, Any] = {"tp": options.tp}
    load = (24, 256, 32) if options.cpu else (128, 512, 128)

    def done(name: str, value: Any) -> None:
        results[name] = value
        print(name, value, flush=True)
        save(f"tp{options.tp}-{'cpu' if options.cpu else 'gpu'}", results)

    try:
        servers.start()
        if options.compile:
            return 0
        print("all are up", flush=True)
        wait_for_file(options.after)
        done("tokens", compare(servers))
        done("throughput", measure(servers, options.pairs, load, streamed=False))
        done("throughput_streamed", measure(servers, options.pairs, load, streamed=True))
        if not options.cpu:
            done("contexts", probe(servers))
        done("starved", starve(servers))
        with suppress(ProcessLookupError):
            for server in servers.compared.values():
                if server is not servers.elastic:
                    server.stop()
        if options.cpu:  # where two cores have to do
            servers.neighbour.start().wait_ready(READY_SECONDS)
        done("killed", kill_worker(servers))
    finally:
        servers.stop()
        shutil.rmtree(ledgers, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    found = results["tokens"]
    good = (
        found["kvtide_equals_native"] == found["native_equals_itself"] > 0
        and results["starved"]["failed"] == 0
        and results["starved"]["in_step"]
        and results["killed"]["neighbour_failed"] == 0
        and results["killed"]["neighbour_has_it"]
        and not results.get("contexts", {"scheduler": []})["scheduler"]
    )
    print("ok" if good else "FAILED", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
