"""A CUDA worker's start, told to its neighbours: what it is about to load, and what it came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import vllm

from kvtide.device.cuda import CudaDevice
from kvtide.engines.reservation import StartCosts
from kvtide.engines.seats import find_seat
from kvtide.engines.vllm.own_memory import own_bytes
from kvtide.settings import Settings

__all__ = ["announce_start", "start_key", "weights_on_disk"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def announce_start(worker: Any) -> StartCosts:
    """Reserve what this worker is about to load beside its KV cache, and wait for room for it.

    Raises
    ------
    KvtideError
        There is no seat, or no room within `KVTIDE_WAIT_DEADLINE`.
    """
    settings = Settings.from_environ()
    device = CudaDevice(worker.device.index or 0)
    costs = StartCosts(
        find_seat(settings, device.info),
        device.free_bytes,
        lambda: own_bytes(worker.device),
        settings.dir,
        start_key(worker.vllm_config, worker.rank, device.info.name),
    )
    parallel = worker.vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    costs.reserve(
        weights_on_disk(Path(worker.vllm_config.model_config.model)) // ranks,
        settings.wait_deadline,
    )
    return costs


def weights_on_disk(model: Path) -> int:
    """Bytes of a model's weights where they lie in a directory of this machine, else 0.

    One format is counted: some repositories hold their weights in two.
    """
    for pattern in _WEIGHTS:
        found = sum(file.stat().st_size for file in model.glob(pattern))
        if found:
            return found
    return 0


def start_key(vllm_config: Any, rank: int, device_name: str) -> str:
    """All that a worker's memory beside its KV cache depends on, as a text to compare."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    speculative = vllm_config.speculative_config
    return json.dumps(
        [
            ["vllm", vllm.__version__, device_name, rank],
            [str(model.model), model.revision, str(model.dtype), model.quantization],
            [model.max_model_len, bool(model.enforce_eager)],
            [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
            [scheduler.max_num_seqs, scheduler.max_num_batched_tokens],
            [str(compilation.cudagraph_mode), compilation.cudagraph_capture_sizes],
            None
            if speculative is None
            else [speculative.model, speculative.num_speculative_tokens],
        ]
    )
