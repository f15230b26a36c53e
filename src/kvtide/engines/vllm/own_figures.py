"""What a vLLM worker tells of itself when its start has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vllm

from kvtide.observe.own_figures import Allocated, OwnFigures

__all__ = ["Graphs", "figures_of", "weights_of"]


def weights_of(runner: Any) -> int:
    """Bytes of a model's parameters and buffers, each storage once."""
    model = runner.get_model()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


class Graphs:
    """Counts what capturing graphs takes, by the runner's own figure."""

    def __init__(self, runner: Any) -> None:
        self.captured_bytes = 0
        capture = runner.capture_model

        def counted(*args: Any, **kwargs: Any) -> int:
            taken_bytes = capture(*args, **kwargs)
            self.captured_bytes += int(taken_bytes)
            return int(taken_bytes)

        runner.capture_model = counted


def figures_of(
    worker: Any, bytes_by_kind: dict[str, int], planned_bytes: dict[str, int], source: str
) -> OwnFigures:
    """What a worker tells; `worker` is an `ElasticWorker`."""
    config = worker.vllm_config
    speculative = config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    own_draft = draft is not None and draft.model == config.model_config.model
    given = worker.cache_config.num_gpu_blocks_override is not None
    return OwnFigures(
        engine="vllm",
        version=vllm.__version__,
        config_file=_config_file(config.model_config),
        draft_file=None if draft is None or own_draft else _config_file(draft),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        rank=worker.rank,
        request=_request(config),
        budget_bytes=None if given else worker.kvtide_budget_bytes,
        allocated=tuple(
            Allocated(a.name, a.kind, a.layers, a.count, a.bytes) for a in worker.kvtide_allocated
        ),
        bytes_by_kind=bytes_by_kind,
        planned_bytes=planned_bytes,
        source=source,
    )


def _request(config: Any) -> dict[str, int | str | bool | None]:
    """What decides the plan, in the words of `sizing.request.Request`."""
    from vllm.platforms import current_platform

    cache, parallel = config.cache_config, config.parallel_config
    speculative = config.speculative_config
    kv_dtype = str(cache.cache_dtype)
    layout = vars(cache).get("kv_cache_layout")
    conv_dtype = _told(cache.mamba_cache_dtype)
    return {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "kv_dtype": "fp8" if kv_dtype.startswith("fp8") else kv_dtype,
        "block_size": cache.block_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "speculative_tokens": 0 if speculative is None else speculative.num_speculative_tokens,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "block_outermost": str(layout).startswith("B"),
        "conv_dtype": conv_dtype,
        "state_dtype": _told(cache.mamba_ssm_cache_dtype) or conv_dtype,
        "platform": "cpu" if current_platform.is_cpu() else "cuda",
    }


def _told(dtype: str) -> str | None:
    return None if dtype == "auto" else dtype


def _config_file(model_config: Any) -> str | None:
    """A model's `config.json` on this machine: in its folder, or in the hub's cache."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return str((folder / "config.json").resolve())
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(
        model_config.model, "config.json", revision=model_config.revision
    )
    return found if isinstance(found, str) else None
