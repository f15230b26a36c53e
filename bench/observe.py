"""What observing costs an engine: CPU time of vLLM's scheduler, a step, with counters and without.

    .venvs/vllm-0.30.0/bin/python bench/observe.py --out bench/results/observe.json

vLLM's own scheduler with kvtide's memory, which is only counted; a stand-in answers for the model.
At each step a coin says whether counters, events and log lines are on or do nothing, in one process
and one load, so that all else is equal; `kvtide record` looks on all the time.
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
from kvtide.device.base import DeviceInfo, Handle
from kvtide.observe.tally import Cause, Kind, Owner, Tally, Verb
from kvtide.ranks.endpoint import endpoint_of
from kvtide.units import MIB

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BLOCK_TOKENS, HEADS, HEAD_SIZE, LAYERS = 32, 8, 64, 4
BLOCKS = 1200
DEVICE_BYTES = 192 * MIB
KEPT_SHARE = 0.98  # of the steps, without the longest: the machine has other work


class PaperDevice:
    """Memory that is only counted: so that nothing is measured but the scheduler."""

    def __init__(self) -> None:
        self.info = DeviceInfo(
            f"observe-{os.getpid()}", "paper", "paper", DEVICE_BYTES, 2 * MIB, creates_zeros=True
        )
        self._held_bytes = self._handles = 0

    def reserve(self, size_bytes: int) -> int:
        return 1 << 40

    def unreserve(self, address: int, size_bytes: int) -> None:
        return None

    def create(self, size_bytes: int) -> Handle | None:
        if size_bytes > self.free_bytes():
            return None
        self._held_bytes += size_bytes
        self._handles += 1
        return Handle(size_bytes, self._handles)

    def map(self, address: int, handle: Handle) -> None:
        return None

    def unmap(self, address: int, handle: Handle) -> None:
        return None

    def release(self, handle: Handle) -> None:
        self._held_bytes -= handle.size_bytes

    def zero(self, runs: Any) -> None:
        return None

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        return None

    def fence(self) -> PaperDevice:
        return self

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def free_bytes(self) -> int:
        return DEVICE_BYTES - self._held_bytes

    def close(self) -> None:
        return None


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
    device = PaperDevice()
    settings = Settings(dir=directory / "ledgers", margin=0)
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


class Mute:
    """In place of a journal."""

    note = evicted = waits = resumes = close = staticmethod(_nothing)


class Switch:
    """Turns noting off and on. Objects are exchanged: a class that changes slows all calls."""

    def __init__(self, memory: Any, timed: Any) -> None:
        self._memory, self._timed = memory, timed
        self._journals = (Mute(), memory.journal)
        self._times = (_nothing, timed._time)

    def set(self, on: bool) -> None:
        self._memory.journal = self._memory.changes.journal = self._journals[on]
        self._timed._time = self._times[on]


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


def _mean(values: list[int]) -> float:
    kept = sorted(values)[: round(KEPT_SHARE * len(values))]
    return statistics.fmean(kept)


def _ratio_95(on: list[int], off: list[int], dice: random.Random) -> list[float]:
    """Of the ratio of means: 95% of what resampling gives."""
    ratios = sorted(
        _mean(dice.choices(on, k=len(on))) / _mean(dice.choices(off, k=len(off)))
        for _ in range(400)
    )
    return [round(ratios[10], 5), round(ratios[-11], 5)]


def measure(steps: int, running: int, seed: int) -> dict[str, Any]:
    """So many steps of each kind, in random order."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        scheduler = _scheduler(stack, directory)
        stack.callback(scheduler.tide.close)
        load, dice = Load(scheduler, running, seed), random.Random(seed)
        memory = scheduler.tide.memory
        endpoint = endpoint_of(memory.ranks.members[0].account.key)
        switch = Switch(memory, endpoint.memory._timed)
        environ = os.environ | {"KVTIDE_DIR": str(directory / "ledgers")}
        command = [sys.executable, "-c", "from kvtide.cli import main; main()"]
        record = [*command, "record", "-o", str(directory / "trace.json")]
        watching = subprocess.Popen(record, env=environ, stdout=subprocess.DEVNULL)
        stack.callback(watching.wait)
        stack.callback(watching.terminate)
        for _ in range(300):
            load.step()
        took: dict[bool, list[int]] = {True: [], False: []}
        tally = memory.journal._tallies[0][1]
        before, counted = tally._head, sum(tally._counts[::2])
        while min(map(len, took.values())) < steps:
            on = dice.random() < 0.5
            switch.set(on)
            took[on].append(load.step())
        switch.set(True)
        return {
            "running": running,
            "steps": [len(took[True]), len(took[False])],
            "events_a_step": round((tally._head - before) / len(took[True]), 3),
            "counts_a_step": round((sum(tally._counts[::2]) - counted) / len(took[True]), 3),
            "step_us_on": round(_mean(took[True]) / 1e3, 2),
            "step_us_off": round(_mean(took[False]) / 1e3, 2),
            "ratio": round(_mean(took[True]) / _mean(took[False]), 5),
            "ratio_95": _ratio_95(took[True], took[False], dice),
            "on_ns": took[True],
            "off_ns": took[False],
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
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
        print({k: v for k, v in steps.items() if not k.endswith("_ns")})
    print(figures["call_ns"])
    if given.out is not None:
        given.out.write_text(json.dumps(figures) + "\n")
    return int(any(steps["ratio"] > 1.01 for steps in figures["steps"]))


if __name__ == "__main__":
    sys.exit(main())
