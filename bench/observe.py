"""What observing costs an engine: CPU time of vLLM's scheduler, a step, with counters and without.

    .venvs/vllm-0.30.0/bin/python bench/observe.py --out bench/results/observe.json

Two of vLLM's own schedulers with kvtide's memory, which is only counted, have the same load step by
step in one process; a stand-in answers for the model. At each step a coin says in which of the two
counters, events and log lines are on, and another which goes first, so that all else is equal;
`kvtide record` looks at both all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
KEPT_SHARE = 0.98  # of the pairs, without those that differ most: the machine has other work


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
    """In place of a journal. What an engine evicts is added up all the same, to nobody's use."""

    evicted_blocks = 0
    note = evicted = count_soon = count_now = waits = resumes = close = staticmethod(_nothing)


class Switch:
    """Turns noting off and on. Objects are exchanged: a class that changes slows all calls."""

    def __init__(self, memory: Any, timed: Any) -> None:
        self._memory, self._timed = memory, timed
        self._journals = (Mute(), memory.journal)
        self._tells = (lambda _tally: timed._took.clear(), timed.tell)

    def set(self, on: bool) -> None:
        self._memory.journal = self._memory.changes.journal = self._journals[on]
        self._timed.tell = self._tells[on]


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


Pairs = list[tuple[int, int]]


def _kept(pairs: Pairs) -> Pairs:
    """Without those of which one was interrupted."""
    kept = sorted(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return kept[: round(KEPT_SHARE * len(kept))]


def _ratio(pairs: Pairs) -> float:
    """Of all time with to all time without."""
    return sum(on for on, _ in pairs) / sum(off for _, off in pairs)


def _ratio_95(pairs: Pairs, dice: random.Random) -> list[float]:
    """95% of what resampling the pairs gives."""
    ratios = sorted(_ratio(dice.choices(pairs, k=len(pairs))) for _ in range(400))
    return [round(ratios[10], 5), round(ratios[-11], 5)]


class Observed:
    """One scheduler, its load, and the switch of what it notes."""

    def __init__(self, stack: ExitStack, directory: Path, running: int, seed: int) -> None:
        directory.mkdir()
        scheduler = _scheduler(stack, directory)
        stack.callback(scheduler.tide.close)
        self.load = Load(scheduler, running, seed)
        memory = scheduler.tide.memory
        endpoint = endpoint_of(memory.ranks.members[0].account.key)
        self.switch = Switch(memory, endpoint.memory._timed)
        self._tally = memory.journal._tallies[0][1]
        command = [sys.executable, "-c", "from kvtide.cli import main; main()", "record", "-o"]
        watching = subprocess.Popen(
            [*command, str(directory / "trace.json")],
            env=os.environ | {"KVTIDE_DIR": str(directory / "ledgers")},
            stdout=subprocess.DEVNULL,
        )
        stack.callback(watching.wait)
        stack.callback(watching.terminate)

    def noted(self) -> tuple[int, int]:
        """Events, and all that was counted."""
        return self._tally._head, sum(self._tally._counts[::2])


def measure(steps: int, running: int, seed: int) -> dict[str, Any]:
    """So many pairs of steps."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        both = [Observed(stack, directory / name, running, seed) for name in ("a", "b")]
        for _ in range(300):
            for one in both:
                one.load.step()
        dice = random.Random(seed)
        before = [one.noted() for one in both]
        pairs: Pairs = []
        for _ in range(steps):
            on = dice.randrange(2)
            order = (0, 1) if dice.random() < 0.5 else (1, 0)
            took = [0, 0]
            for i in order:
                both[i].switch.set(i == on)
                took[i] = both[i].load.step()
            pairs.append((took[on], took[1 - on]))
        events, counts = (
            sum(one.noted()[k] - was[k] for one, was in zip(both, before, strict=True))
            for k in range(2)
        )
        for one in both:
            one.switch.set(True)
        kept = _kept(pairs)
        return {
            "running": running,
            "pairs": steps,
            "events_a_step": round(events / steps, 3),
            "counted_a_step": round(counts / steps, 3),
            "step_us_on": round(sum(on for on, _ in kept) / len(kept) / 1e3, 2),
            "step_us_off": round(sum(off for _, off in kept) / len(kept) / 1e3, 2),
            "ratio": round(_ratio(kept), 5),
            "ratio_95": _ratio_95(kept, dice),
            "ratio_of_all": round(_ratio(pairs), 5),
            "on_us": [on // 1000 for on, _ in pairs],
            "off_us": [off // 1000 for _, off in pairs],
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
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
        print({k: v for k, v in steps.items() if k not in ("on_us", "off_us")})
    print(figures["call_ns"])
    if given.out is not None:
        given.out.write_text(json.dumps(figures) + "\n")
    return int(any(steps["ratio"] > 1.01 for steps in figures["steps"]))


if __name__ == "__main__":
    sys.exit(main())
