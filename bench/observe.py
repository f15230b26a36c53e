"""What observing costs an engine: CPU time of vLLM's scheduler, a step, with counters and without.

    .venvs/vllm-0.30.0/bin/python bench/observe.py --out bench/results/observe.json

vLLM's own scheduler with kvtide's memory on a host device; a stand-in answers for the model. Chunks
of steps with everything on (counters, events, log; `kvtide serve` and `kvtide record` look on) take
turns with chunks in which counting does nothing, in one process, so that all else is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide.bench.machine import machine
from kvtide.device import open_device
from kvtide.observe.tally import Cause, Kind, Owner, Tally, Verb
from kvtide.units import MIB

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BLOCK_TOKENS, HEADS, HEAD_SIZE, LAYERS = 32, 8, 64, 4
BLOCKS = 1200
DEVICE_BYTES = 192 * MIB
CHUNK_STEPS = 40


def _scheduler(stack: ExitStack, directory: Path) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: F401
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from kvtide.engines.seats import spec_of
    from kvtide.engines.vllm import introduction
    from kvtide.engines.vllm.scheduler import make_scheduler
    from kvtide.ledger import Ledger
    from kvtide.pool import Geometry
    from kvtide.ranks.endpoint import Endpoint
    from kvtide.ranks.memory import RankMemory
    from kvtide.ranks.messages import decode_description
    from kvtide.ranks.seat import Seat
    from kvtide.settings import Settings
    from kvtide.verify.models import make_model

    model = make_model("llama-wide", directory / "model")
    config = ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True)
    sequences = 64
    vllm_config = VllmConfig(
        model_config=config,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=4096,
            max_num_seqs=sequences,
            max_model_len=2048,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    vllm_config.cache_config.num_gpu_blocks = BLOCKS
    group = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    block_bytes = group.page_size_bytes * LAYERS
    kv = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}" for n in range(LAYERS)], group)],
    )
    device = open_device("host", host_total_bytes=DEVICE_BYTES, host_uuid=f"observe-{os.getpid()}")
    stack.callback(device.close)
    settings = Settings(dir=directory / "ledgers")
    ledger = Ledger.open(settings.dir, spec_of(device.info, settings))
    stack.callback(ledger.close)
    instance = ledger.register("observed", explicit=True)
    from kvtide.bench.rig import strips_of

    geometry = Geometry.of(BLOCKS, strips_of(BLOCKS, block_bytes, 1), device.info.granularity_bytes)
    account = ledger.enroll(
        instance,
        pool_name="kv",
        rank=0,
        blocks_total=BLOCKS,
        block_bytes=block_bytes,
        sampler=device.free_bytes,
    )
    endpoint = Endpoint(
        RankMemory(device, geometry.arena_bytes, account),
        Seat(ledger, instance),
        geometry,
        "block-major",
        0,
        None,
    )
    endpoint.back_null_block()
    described = decode_description(endpoint.describe())
    introduction._last = introduction.Introduction((described,), None)
    return make_scheduler(
        vllm_config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_TOKENS,
        log_stats=False,
    )


class Load:
    """Requests that come as others end, with prompts of which some come again."""

    def __init__(self, scheduler: Any, running: int, seed: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._scheduler = scheduler
        self._running = running
        self._dice = random.Random(seed)
        self._count = 0

    def _request(self) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        dice = random.Random(self._dice.randrange(200))
        prompt = [dice.randrange(3, 2000) for _ in range(dice.randrange(64, 700))]
        parameters = SamplingParams(max_tokens=self._dice.randrange(16, 120), ignore_eos=True)
        parameters.update_from_generation_config({}, 2)
        return Request(
            request_id=f"r{self._count}",
            prompt_token_ids=prompt,
            sampling_params=parameters,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def step(self) -> int:
        """One step; nanoseconds of CPU that the scheduler took."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        while len(scheduler.requests) < self._running:
            scheduler.add_request(self._request())
        begun = time.thread_time_ns()
        output = scheduler.schedule()
        took = time.thread_time_ns() - begun
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = scheduler.requests[request_id]
            ready = request.num_computed_tokens >= request.num_tokens
            sampled.append([self._dice.randrange(3, 2000)] if ready else [])
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        begun = time.thread_time_ns()
        scheduler.update_from_output(output, answer)
        return took + time.thread_time_ns() - begun


def _nothing(*_: object) -> None:
    """In place of counting."""


class Switch:
    """Turns counting off and on again, in all tallies of this process."""

    def __init__(self) -> None:
        self._on = {name: getattr(Tally, name) for name in ("count", "note", "time")}
        self.calls = 0

    def set(self, on: bool) -> None:
        for name, method in self._on.items():
            setattr(Tally, name, method if on else _nothing)


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


def measure(chunks: int, running: int, seed: int) -> dict[str, Any]:
    """Chunks in turns, each pair in random order."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        scheduler = _scheduler(stack, directory)
        stack.callback(scheduler.tide.close)
        load, switch = Load(scheduler, running, seed), Switch()
        environ = os.environ | {"KVTIDE_DIR": str(directory / "ledgers")}
        command = [sys.executable, "-c", "from kvtide.cli import main; main()"]
        record = ["record", "-o", str(directory / "trace.json")]
        watching = [subprocess.Popen([*command, *record], env=environ, stdout=subprocess.DEVNULL)]
        for process in watching:
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for _ in range(300):
            load.step()
        dice = random.Random(seed)
        pairs = []
        before = dict(scheduler.tide.memory.journal._tallies[0][1].__dict__)["_head"]
        for _ in range(chunks):
            took = {}
            for on in dice.sample([True, False], 2):
                switch.set(on)
                took[on] = sum(load.step() for _ in range(CHUNK_STEPS)) / CHUNK_STEPS
            pairs.append((took[True], took[False]))
        switch.set(True)
        tally = scheduler.tide.memory.journal._tallies[0][1]
        events = tally._head - before
        ratios = sorted(on / off for on, off in pairs)
        middle = statistics.median(ratios)
        # Of the median, by the order of the ratios: 95% of all such samples hold it.
        reach = round(0.98 * len(ratios) ** 0.5)
        at = len(ratios) // 2
        return {
            "running": running,
            "steps_of_each": chunks * CHUNK_STEPS,
            "events_a_step": round(events / (chunks * CHUNK_STEPS), 3),
            "step_us_on": round(statistics.median(on for on, _ in pairs) / 1e3, 2),
            "step_us_off": round(statistics.median(off for _, off in pairs) / 1e3, 2),
            "ratio": round(middle, 5),
            "ratio_95": [round(ratios[at - reach], 5), round(ratios[at + reach], 5)],
            "pairs_ns": [[round(on), round(off)] for on, off in pairs],
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print("seed", given.seed)
    figures = {
        "machine": machine(),
        "call_ns": _each_ns(),
        "steps": [measure(given.chunks, running, given.seed) for running in (8, 32)],
    }
    for steps in figures["steps"]:
        print({k: v for k, v in steps.items() if k != "pairs_ns"})
    print(figures["call_ns"])
    if given.out is not None:
        given.out.write_text(json.dumps(figures) + "\n")
    return int(any(steps["ratio"] > 1.01 for steps in figures["steps"]))


if __name__ == "__main__":
    sys.exit(main())
