"""SGLang's own pool sizes for configurations, as JSON: run in SGLang's environment.

    python sglang_specs.py '[{"config": "FILE", "tp": 1, ...}, ...]'

Each configuration goes through SGLang's arguments, model configuration and pool configurator as
on a CPU server, with the budget in place of the memory that it would have profiled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.model_runner_components.layer_setup import ModelLayerInfo
from sglang.srt.runtime_context import get_schedule
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

GIB = 1 << 30


def configurator(case: dict, folder: Path) -> KVCacheConfigurator:
    raw = json.loads(Path(case["config"]).read_text())
    raw.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(raw))
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend=case.get("attention_backend", "torch_native"),
        skip_tokenizer_init=True,
        load_format="dummy",
        mem_fraction_static=0.5,
        context_length=case["max_model_len"],
        tp_size=case["tp"],
        page_size=case.get("block_size"),
        # The other strategy changes how many requests run, not what is allocated, and asks for
        # an accelerator.
        mamba_radix_cache_strategy="no_buffer",
        disable_overlap_schedule=True,
    )
    set_global_server_args_for_scheduler(arguments)
    model = ModelConfig.from_server_args(arguments)
    layers = max(model.num_hidden_layers, model.num_attention_layers)
    return KVCacheConfigurator(
        device="cpu",
        gpu_id=0,
        ps=SimpleNamespace(pp_size=1, tp_size=case["tp"], attn_dp_size=1),
        pp_group=None,
        model=None,
        model_config=model,
        server_args=arguments,
        kv_cache_dtype=model.dtype,
        model_dtype=model.dtype,
        page_size=get_schedule().page_size,
        sliding_window_size=model.sliding_window_size,
        spec_algorithm=SpeculativeAlgorithm.from_string(None),
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=None,
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=model.is_hybrid_swa_compress,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=ModelLayerInfo(start_layer=0, end_layer=layers, num_effective_layers=layers),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
        kv_cache_dtype_str="auto",
    )


def figures(case: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        found = configurator(case, Path(folder))
        left, slots = case["budget_bytes"], 0
        if mambaish_config(found.model_config) is not None:
            left = int(found._handle_max_mamba_cache(left / GIB) * GIB)
            slots = get_schedule().max_mamba_cache_size
        config = found.config_from_budget(left)
        buffers = None
        if case.get("build"):
            pool = found._build_mha_kv_pool(
                max_total_num_tokens=config.max_total_num_tokens, mha_pool_class=MHATokenToKVPool
            )
            buffers = [
                [t.numel() * t.element_size() for t in half]
                for half in (pool.k_buffer, pool.v_buffer)
            ]
        return {
            "page_size": get_schedule().page_size,
            "num_tokens": config.max_total_num_tokens,
            "window_tokens": config.swa_max_total_num_tokens,
            "slots": slots,
            "buffers": buffers,
        }


def main() -> None:
    results = []
    for case in json.loads(sys.argv[1]):
        try:
            results.append(figures(case))
        except Exception as error:  # noqa: BLE001 - told to the test, which fails on it
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
