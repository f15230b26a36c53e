"""The model types that can be planned: a table of how each one's layers are built and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvtide.sizing import attention_models as attention
from kvtide.sizing import hybrid_models as hybrid
from kvtide.sizing.fields import Fields
from kvtide.sizing.layers import Layer, Shared

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one `model_type`.

    Parameters
    ----------
    build
        Makes the layers of the decoder; `names.layer` and so on are used to name them.
    layer, attn, state
        Name of decoder layer `i`, and what its attention and its state append to it.
    drafts, drafts_default, draft_layer
        The field that counts the model's own draft (MTP) layers, how many engines build where
        the file has none, and what they are called.
    defaults
        Defaults of the model type's configuration class for fields that real files leave out.
    derives
        Fields that the class computes from others where the file has none: `head_dim`,
        `num_key_value_heads`. All others must be in the file.
    layers_field, max_len_field
        The fields that count decoder layers and positions.
    one_by_one
        Whether what `per_layer_config` tells of single layers is read.
    """

    build: Callable[[Fields, Family], tuple[list[Layer], list[Shared]]]
    layer: str = "model.layers.{i}"
    attn: str = ".self_attn.attn"
    state: str = ".mixer"
    drafts: str | None = None
    drafts_default: int = 0
    draft_layer: str = "model.layers.{i}"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    derives: tuple[str, ...] = ()
    layers_field: str = "num_hidden_layers"
    max_len_field: str = "max_position_embeddings"
    one_by_one: bool = False


_DIM = ("head_dim",)
_BOTH = ("head_dim", "num_key_value_heads")
_PLAIN = Family(attention.plain)
_DERIVED = Family(attention.plain, derives=_DIM)
_LLAMA = Family(attention.plain, derives=_BOTH)
# What vLLM runs through transformers' own modules, whose attention layers it only counts.
_MODULES = Family(attention.plain, layer="{i}", attn=".attn", derives=_BOTH)
_PATTERNED = Family(attention.patterned, derives=_BOTH, defaults={"sliding_window_pattern": 4})
_MLA = Family(attention.mla, drafts="num_nextn_predict_layers")
_GEMMA3 = Family(
    attention.gemma3,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
)
_QWEN3_5 = Family(
    hybrid.qwen3_next,
    state=".linear_attn",
    drafts="mtp_num_hidden_layers",
    draft_layer="mtp.layers.{draft}",
    # The dtype of the recurrent state is the file's `mamba_ssm_dtype`; files always give it.
    defaults={"full_attention_interval": 4},
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _DERIVED,
    "mixtral": _DERIVED,
    "qwen2": _DERIVED,
    "qwen2_moe": _DERIVED,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "qwen2_vl": _DERIVED,
    "qwen2_5_vl": _DERIVED,
    "qwen2_vl_text": _DERIVED,
    "qwen2_5_vl_text": _DERIVED,
    "qwen3_vl_text": _PLAIN,
    "qwen3_vl_moe_text": _PLAIN,
    "phi3": _LLAMA,
    "minimax_m2": _PLAIN,
    "glm4": _PLAIN,
    "glm4v_moe_text": _PLAIN,
    "granite": _DERIVED,
    "gemma": _PLAIN,
    "glm4_moe": Family(attention.plain, drafts="num_nextn_predict_layers"),
    "llama4_text": Family(attention.llama4, derives=_DIM, defaults={"attention_chunk_size": 8192}),
    "gemma2": Family(attention.gemma2, defaults={"head_dim": 256, "sliding_window": 4096}),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "gemma3n_text": Family(
        attention.gemma3n,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
            "max_position_embeddings": 32768,
        },
    ),
    "gemma4_text": Family(attention.gemma4, one_by_one=True),
    "gpt_oss": Family(
        attention.gpt_oss, attn=".attn.attn", defaults={"head_dim": 64, "sliding_window": 128}
    ),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "glm4_moe_lite": _MLA,
    "kimi_k2": _MLA,
    "qwen3_next": Family(
        hybrid.qwen3_next,
        state=".linear_attn",
        drafts="num_nextn_predict_layers",
        drafts_default=1,
        draft_layer="mtp.layers.{draft}",
        defaults={"full_attention_interval": 4},
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "minimax_text_01": Family(hybrid.minimax_text_01, state=".self_attn"),
    "minimax_m1": Family(hybrid.minimax_text_01, state=".self_attn"),
    "minimax": Family(hybrid.minimax_text_01, state=".self_attn"),
    "jamba": Family(hybrid.jamba, attn=".attn", derives=_DIM),
    "falcon_h1": Family(hybrid.falcon_h1, attn=".attn"),
    "nemotron_h": Family(hybrid.nemotron_h, attn=".mixer.attn"),
    "granitemoehybrid": Family(hybrid.granite_hybrid, derives=_DIM),
    "lfm2": Family(hybrid.lfm2, state=".short_conv", derives=_DIM),
    "lfm2_moe": Family(hybrid.lfm2, state=".short_conv", derives=_DIM),
    "mamba": Family(hybrid.mamba1, layer="backbone.layers.{i}"),
    "falcon_mamba": Family(hybrid.mamba1, layer="backbone.layers.{i}"),
    "mamba2": Family(hybrid.mamba2, layer="backbone.layers.{i}"),
    # Plain decoders under other names.
    "arcee": _LLAMA,
    "cohere": _LLAMA,
    "ernie4_5": _LLAMA,
    "ernie4_5_moe": _LLAMA,
    "glm": _PLAIN,
    "granitemoe": _LLAMA,
    "granitemoeshared": _LLAMA,
    "hy_v3": _LLAMA,
    "hyperclovax": _LLAMA,
    "jais2": _LLAMA,
    "ministral3": _LLAMA,
    "nemotron": _LLAMA,
    "olmoe": _LLAMA,
    "phi": _LLAMA,
    "phimoe": _LLAMA,
    "seed_oss": _LLAMA,
    "stablelm": _LLAMA,
    "gpt_neox": Family(
        attention.plain,
        layer="gpt_neox.layers.{i}",
        attn=".attention.attn",
        derives=_BOTH,
    ),
    "opt": Family(
        attention.plain,
        layer="model.decoder.layers.{i}",
        derives=_BOTH,
    ),
    "olmo": _MODULES,
    "olmo2": _MODULES,
    "smollm3": _MODULES,
    # Windows in some layers.
    "cohere2": _PATTERNED,
    "cwm": _PATTERNED,
    "exaone4": _PATTERNED,
    "granite_swa": _PATTERNED,
    "olmo3": replace(_PATTERNED, layer=_MODULES.layer, attn=_MODULES.attn),
    "whisper": Family(
        attention.whisper,
        layer=".decoder.layers.{i}.layers",
        layers_field="decoder_layers",
        max_len_field="max_target_positions",
    ),
}
