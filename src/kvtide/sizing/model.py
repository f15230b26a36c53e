"""Reading a model's configuration into layers by name and kind. The only I/O of `sizing`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtide.sizing.attention_models import layer_count
from kvtide.sizing.errors import ConfigError
from kvtide.sizing.families import FAMILIES, Family
from kvtide.sizing.fields import Fields, read_json
from kvtide.sizing.layers import Attention, Layer, Shared

__all__ = ["Model", "model_from_config", "read_model"]

_CONFIG = "config.json"
_QUANTISED = "hf_quant_config.json"
_FP8_WORDS = ("fp8", "float8", "fp8_e4m3")
# Some draft models wrap the configuration of what they are made of.
_EAGLE = "eagle"
# What decides of a layer's KV, and a file may tell of single layers.
_OF_KV = ("head_dim", "num_key_value_heads", "sliding_window", "kv_lora_rank", "qk_rope_head_dim")
# The text part of a multimodal configuration, by the names that published files use.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the plan sees it.

    Parameters
    ----------
    name, file, model_type
        What the user called it, the file that was read, the type of its text part.
    layers
        What keeps memory, in the engine's order; drafts are not among them.
    shared
        Layers that read another layer's KV and keep nothing.
    num_layers
        Decoder layers, with those that keep nothing: pipeline stages split these.
    encoder_layers
        Layers of an encoder before the decoder, which only some engines give buffers.
    own_drafts
        The model's own draft (MTP) layers, used when speculative tokens are asked for.
    dtype
        The dtype that engines run it in.
    weights_kv_dtype
        The KV dtype that quantised weights ask for, which `auto` follows.
    ssm_dtype
        The dtype of recurrent states that the file names, which engines read differently.
    max_model_len
        Tokens that the file says it was made for.
    assumed
        Fields that the file leaves to the defaults of the model type.
    """

    name: str
    file: str
    model_type: str
    architectures: tuple[str, ...]
    layers: tuple[Layer, ...]
    shared: tuple[Shared, ...]
    num_layers: int
    encoder_layers: int
    own_drafts: tuple[Layer, ...]
    dtype: str
    weights_kv_dtype: str | None
    ssm_dtype: str | None
    max_model_len: int | None
    assumed: tuple[str, ...]


def read_model(path: str | os.PathLike[str], *, dtype: str | None = None) -> Model:
    """Read `config.json`, or the one in a folder, and `hf_quant_config.json` beside it.

    `dtype` is what the engine runs it in, where it was told; else it is the file's.

    Raises
    ------
    ConfigError
        The file cannot be read, its `model_type` is not known, or a field is missing or odd.
    """
    given = Path(path)
    file = given / _CONFIG if given.is_dir() else given
    if not file.exists():
        raise ConfigError(
            f"{os.fspath(path)!r} is neither a config.json nor a folder that holds one; kvtide "
            "downloads nothing: name a file or a model's folder"
        )
    config = read_json(file)
    beside = file.with_name(_QUANTISED)
    if "quantization_config" not in config and beside.exists():
        config["quantization_config"] = {"quant_method": "modelopt", **read_json(beside)}
    name = file.resolve().parent.name if file.name == _CONFIG else file.stem
    return model_from_config(config, name=name, file=str(file), dtype=dtype)


def model_from_config(
    config: Mapping[str, Any], *, name: str, file: str = _CONFIG, dtype: str | None = None
) -> Model:
    """The same from a configuration in memory; `file` is what errors call it."""
    if config.get("model_type") == _EAGLE and isinstance(config.get("model"), dict):
        config = {"torch_dtype": config.get("torch_dtype"), **config["model"]}
    part = next((p for p in _TEXT_PARTS if isinstance(config.get(p), dict)), None)
    text: dict[str, Any] = dict(config[part]) if part else dict(config)
    model_type = text.get("model_type") or config.get("model_type")
    if model_type is None:
        raise ConfigError(
            f"{file} has no 'model_type': the plan needs it to know which layers there are"
        )
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(
            f"{file}: model_type {model_type!r} is not one that can be planned. The planner would "
            "need a family for it: how many layers it has, which of them keep KV for every token "
            "(heads and their size), which only a window, which a recurrent state and of what "
            f"shape. Known: {', '.join(sorted(FAMILIES))}"
        )
    if text.get("dtype") is None and text.get("torch_dtype") is None:
        inherited = config.get("dtype") or config.get("torch_dtype")
        if inherited is not None:
            text["dtype"] = inherited
    fields = Fields(
        text,
        file=file,
        section=part or "",
        model_type=model_type,
        defaults=family.defaults,
        told_dtype=dtype,
    )
    if part:
        family = replace(family, layer=f"language_model.{family.layer}")
    if not family.one_by_one:
        _check_alike(fields)
    layers, shared = family.build(fields, family)
    num_layers = layer_count(fields, family)
    longest = fields.integer_or(family.max_len_field, 0) or None
    return Model(
        name=name,
        file=file,
        model_type=model_type,
        architectures=tuple(config.get("architectures") or ()),
        layers=tuple(layers),
        shared=tuple(shared),
        num_layers=num_layers,
        encoder_layers=fields.integer_or("encoder_layers", 0),
        own_drafts=_own_drafts(fields, family, layers, num_layers),
        dtype=fields.run_dtype("the dtype that the KV cache has under kv-dtype auto"),
        weights_kv_dtype=_weights_kv_dtype(config, text),
        ssm_dtype=fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype"),
        max_model_len=longest,
        assumed=tuple(fields.assumed),
    )


def _check_alike(fields: Fields) -> None:
    """Layers that differ are not planned as if they did not."""
    for index, layer in fields.one_by_one().items():
        name = next((name for name in _OF_KV if layer.has(name)), None)
        if name is not None:
            raise ConfigError(
                f"{fields.file}: per_layer_config gives layer {index} a {name} of its own; the "
                f"plan of a {fields.model_type} model knows none of single layers"
            )


def _own_drafts(
    fields: Fields, family: Family, layers: list[Layer], num_layers: int
) -> tuple[Layer, ...]:
    """MTP layers: each is one more layer like the model's last attention (with its indexer)."""
    count = fields.integer_or(family.drafts, family.drafts_default) if family.drafts else 0
    attention = [layer for layer in layers if isinstance(layer, Attention)]
    if not count or not attention:
        return ()
    last = attention[-1].index
    drafts: list[Layer] = []
    for draft in range(count):
        index = num_layers + draft
        prefix = family.draft_layer.format(i=index, draft=draft)
        for layer in attention:
            if layer.index == last:
                suffix = layer.name.removeprefix(family.layer.format(i=last))
                drafts.append(replace(layer, name=prefix + suffix, index=index, draft=True))
    return tuple(drafts)


def _weights_kv_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """The KV dtype that the weights were calibrated for, if they say one, in the file's word.

    Weights alone being fp8 or mxfp4 says nothing about KV: it stays in the model's dtype.
    """
    found = (
        config.get("quantization_config")
        or config.get("compression_config")
        or text.get("quantization_config")
    )
    if not isinstance(found, dict):
        return None
    inner = found.get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    asked = (
        inner.get("kv_cache_scheme")
        or found.get("kv_cache_scheme")
        or inner.get("kv_cache_quant_algo")
        or found.get("kv_cache_quant_algo")
    )
    if asked is None:
        return None
    if isinstance(asked, dict):
        asked = f"{asked.get('type')}{asked.get('num_bits')}"
    return "fp8" if str(asked).lower() in _FP8_WORDS else str(asked)
