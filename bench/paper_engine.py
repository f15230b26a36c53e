"""A vLLM engine without a model: its own schedulers over memory that is only counted."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide.bench.rig import strips_of
from kvtide.device.base import DeviceInfo, Handle
from kvtide.units import MIB

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BLOCK_TOKENS, HEADS, HEAD_SIZE, LAYERS = 32, 8, 64, 4
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * 4 * LAYERS


class PaperDevice:
    """Memory that is only counted: so that nothing is measured but the scheduler."""

    def __init__(self, total_bytes: int) -> None:
        self.info = DeviceInfo(
            f"paper-{os.getpid()}", "paper", "paper", total_bytes, 2 * MIB, creates_zeros=True
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
        return self.info.total_bytes - self._held_bytes

    def close(self) -> None:
        return None


class Configuration:
    """What vLLM's schedulers are made of: so many requests at once, and blocks for so many."""

    def __init__(self, directory: Path, blocks: int, *, sequences: int, ahead: bool) -> None:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from kvtide.verify.models import make_model

        model = make_model("llama-wide", directory / "model")
        config = ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True)
        self.vllm = VllmConfig(
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
        self.vllm.cache_config.num_gpu_blocks = blocks
        # vLLM turns it off on a CPU.
        self.vllm.scheduler_config.async_scheduling = ahead
        group = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        assert group.page_size_bytes * LAYERS == BLOCK_BYTES
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}" for n in range(LAYERS)], group)],
        )
        self._native = AsyncScheduler if ahead else Scheduler
        self._blocks = blocks
        self._parts = {
            "kv_cache_config": kv,
            "structured_output_manager": StructuredOutputManager(self.vllm),
            "block_size": BLOCK_TOKENS,
            "log_stats": False,
        }

    def native(self) -> Any:
        """vLLM's own scheduler."""
        return self._native(self.vllm, **self._parts)

    def elastic(self, stack: ExitStack, ledgers: Path, device_bytes: int) -> Any:
        """kvtide's, over memory for so much, in a ledger of its own."""
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

        device = PaperDevice(device_bytes)
        settings = Settings(dir=ledgers, margin=0)
        ledger = Ledger.open(settings.dir, spec_of(device.info, settings))
        stack.callback(ledger.close)
        instance = ledger.register("paper", explicit=True)
        strips = strips_of(self._blocks, BLOCK_BYTES, 1)
        geometry = Geometry.of(self._blocks, strips, device.info.granularity_bytes)
        account = ledger.enroll(
            instance,
            pool_name="kv",
            rank=0,
            blocks_total=self._blocks,
            block_bytes=BLOCK_BYTES,
            sampler=device.free_bytes,
        )
        memory = RankMemory(device, geometry.arena_bytes, account)
        endpoint = Endpoint(memory, Seat(ledger, instance), geometry, "block-major", 0, None)
        endpoint.back_null_block()
        described = decode_description(endpoint.describe())
        introduction._last = introduction.Introduction((described,), None)
        scheduler = make_scheduler(self.vllm, **self._parts)
        stack.callback(scheduler.tide.close)
        return scheduler


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
        """One step; nanoseconds of CPU that the scheduler took. What it computed of each request is
        in `scheduled`."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        while len(scheduler.requests) < self._running:
            scheduler.add_request(self._request())
        begun = time.thread_time_ns()
        output = scheduler.schedule()
        took = time.thread_time_ns() - begun
        self.scheduled: dict[str, int] = output.num_scheduled_tokens
        ids = list(self.scheduled)
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
