"""vLLM's own KV-cache figures for configurations, as JSON: run in vLLM's environment.

    python vllm_specs.py '[{"config": "FILE", "tp": 1, ...}, ...]'

Each model is built by vLLM's own classes on torch's meta device, so no weights are held; its
specs then go through vLLM's grouping, page unification, block counting and printed capacity.
"""

# ruff: noqa: E402 - vLLM reads the environment while it is imported

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from pathlib import Path

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_PLUGINS="", VLLM_CPU_KVCACHE_SPACE="1"
)


class Absent(types.ModuleType):
    """Stands for an image processor that needs torchvision, which a CPU build does without."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for processor in (
    "qwen2_vl.image_processing_qwen2_vl",
    "qwen2_vl.video_processing_qwen2_vl",
    "qwen3_vl.video_processing_qwen3_vl",
):
    sys.modules[f"transformers.models.{processor}"] = Absent(processor)

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

# Else every class is inspected in a process of its own, seconds each.
registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: registry._ModelInfo.from_model_cls(
    lazy.load_model_cls()
)
# The dtype of states would follow the machine's instruction set.
torch.cpu._is_avx512_bf16_supported = lambda: False


def engine_config(case: dict, folder: Path):
    raw = json.loads(Path(case["config"]).read_text())
    raw.pop("quantization_config", None)  # how weights are stored: no CPU kernels for some
    if text_architecture := case.get("text_architecture"):
        dtype = raw.get("dtype", raw.get("torch_dtype"))
        raw = {"torch_dtype": dtype, **raw["text_config"], "architectures": [text_architecture]}
    raw.update(case.get("smaller", {}))
    (folder / "config.json").write_text(json.dumps(raw))
    options = {}
    if case.get("speculative_tokens"):
        speculation = {"method": "mtp", "num_speculative_tokens": case["speculative_tokens"]}
        if "draft" in case:
            (folder / "draft").mkdir()
            (folder / "draft" / "config.json").write_text(Path(case["draft"]).read_text())
            speculation |= {"method": case["method"], "model": str(folder / "draft")}
        options["speculative_config"] = speculation
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=case["max_model_len"],
        max_num_seqs=case["max_num_seqs"],
        block_size=case.get("block_size"),
        kv_cache_dtype=case.get("kv_dtype", "auto"),
        **options,
    ).create_engine_config()


def build(config, case: dict, stage: int):
    """The specs of one pipeline stage of one tensor parallel rank."""
    config.compilation_config.static_forward_context.clear()
    config.parallel_config.tensor_parallel_size = case["tp"]
    config.parallel_config.pipeline_parallel_size = case["pp"]
    with set_current_vllm_config(config):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
        # This one process stands for one rank of many: no collective is ever called.
        parallel_state.get_tp_group().world_size = case["tp"]
        pp_group = parallel_state.get_pp_group()
        pp_group.world_size, pp_group.rank_in_group = case["pp"], stage
        pp_group.ranks = list(range(case["pp"]))
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("cpu" if "smaller" in case else "meta"):
            initialize_model(vllm_config=config)
            if config.speculative_config is not None:
                draft = config.speculative_config.draft_model_config
                initialize_model(vllm_config=config, model_config=draft)
        torch.set_default_dtype(torch.float32)
        current_platform.update_block_size_for_backend(config)
        return get_kv_cache_spec(config)


def with_indexer(specs: dict, config, head_size: int) -> dict:
    """Add the DSA indexer's specs as its cache module makes them; the CPU has no such model."""
    added = {}
    for name, spec in specs.items():
        added[name] = spec
        added[name.replace(".attn", ".indexer.k_cache")] = MLAAttentionSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=1,
            head_size=head_size,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
        )
    return added


def figures(case: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(case, Path(folder))
        specs = [build(config, case, stage) for stage in range(case["pp"])]
    if case.get("indexer_bytes"):
        specs = [with_indexer(s, config, case["indexer_bytes"]) for s in specs]
    config.cache_config.kv_cache_layout = None
    resolve_kv_cache_layout(config, [[case.get("layout", "LBHNC")]], specs[0].values())
    budgets = [case["budget_bytes"]] * len(specs)
    found = kv_cache_utils.get_kv_cache_configs(config, specs, budgets)
    whole = kv_cache_utils.generate_scheduler_kv_cache_config(found)
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(config, whole)
    longest = [
        kv_cache_utils._estimate_max_model_len_from_groups(
            config,
            rank.kv_cache_groups,
            case["tight_bytes"] - kv_cache_utils._pool_bytes_per_block(rank.kv_cache_groups),
        )
        for rank in found
    ]
    try:
        kv_cache_utils.get_kv_cache_configs(config, specs, [case["too_small_bytes"]] * len(specs))
        refused = False
    except ValueError:
        refused = True
    return {
        "block_size": config.cache_config.block_size,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_in_flight_tokens": config.max_in_flight_tokens,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "num_blocks": whole.num_blocks,
        "num_tokens": tokens,
        "max_concurrency": concurrency,
        "refused_below": refused,
        "longest_max_model_len": min(longest),
        "ranks": [
            {
                "slabs": slabs(rank),
                "allocated_bytes": rank.kv_cache_tensors[0].size,
                "groups": [
                    {
                        "layers": group.layer_names,
                        "block_size": group.kv_cache_spec.block_size,
                        "bytes_per_block": sum(
                            kv_cache_utils._get_per_layer_spec(group, name).page_size_bytes
                            for name in group.layer_names
                        ),
                    }
                    for group in rank.kv_cache_groups
                ],
            }
            for rank in found
        ],
    }


def slabs(rank) -> list[list[str]]:
    """The layers that lie at each place of the allocation, by their offset in it."""
    found: dict[int, list[str]] = {}
    for tensor in rank.kv_cache_tensors:
        for place, layer in enumerate(tensor.layers):
            found.setdefault(tensor.offset + place * tensor.layer_stride, []).append(layer)
    return [sorted(found[offset]) for offset in sorted(found)]


def main() -> None:
    parallel_state.init_distributed_environment(
        1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo"
    )
    results = []
    for case in json.loads(sys.argv[1]):
        try:
            results.append(figures(case))
        except Exception as error:  # noqa: BLE001 - told to the test, which fails on it
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
