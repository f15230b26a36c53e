"""Configurations that cannot be read: the error names the file, the field and what is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtide.sizing.errors import ConfigError
from kvtide.sizing.layers import Kind
from kvtide.sizing.model import model_from_config, read_model

CONFIGS = Path(__file__).parents[2] / "data" / "configs"

# Fields without which no layer can be sized, by configuration; a dot leads into the text part.
NEEDED = {
    "llama-3.1-8b": ["num_hidden_layers", "num_attention_heads", "hidden_size", "torch_dtype"],
    "mistral-7b-v0.1": ["num_key_value_heads"],
    "qwen3-8b": ["num_hidden_layers", "num_key_value_heads", "head_dim"],
    "qwen3.5-27b": [
        "text_config.linear_num_key_heads",
        "text_config.linear_num_value_heads",
        "text_config.linear_key_head_dim",
        "text_config.linear_value_head_dim",
        "text_config.linear_conv_kernel_dim",
        "text_config.num_key_value_heads",
        "text_config.dtype",
    ],
    "gemma-4-31b": ["text_config.global_head_dim", "text_config.sliding_window"],
    "deepseek-v3.2": ["kv_lora_rank", "qk_rope_head_dim", "index_head_dim"],
    "jamba-v0.1": ["attn_layer_period", "attn_layer_offset", "mamba_d_state", "mamba_d_conv"],
    "falcon-h1-7b": ["mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"],
    "nemotron-h-8b": ["hybrid_override_pattern", "ssm_state_size", "mamba_num_heads"],
    "granite-4.0-h-small": ["layer_types", "mamba_expand"],
    "lfm2-1.2b": ["full_attn_idxs", "conv_L_cache"],
    "mamba2-2.7b": ["expand", "state_size", "conv_kernel", "n_groups"],
    "whisper-large-v3": ["decoder_layers", "decoder_attention_heads", "d_model"],
    "minimax-text-01": ["attn_type_list"],
}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in NEEDED.items() for field in fields]
)
def test_a_missing_field_is_named_with_its_file_and_its_use(name, field, tmp_path):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    part = config
    *path, last = field.split(".")
    for key in path:
        part = part[key]
    del part[last]
    config.pop("torch_dtype", None) if last == "dtype" else None
    config.pop("dtype", None) if last in ("dtype", "torch_dtype") else None
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refusal:
        read_model(tmp_path)
    message = str(refusal.value)
    assert str(file) in message
    expected = field.replace("dtype", "torch_dtype") if last == "dtype" else field
    assert f"{expected!r}" in message
    assert "needs it (" in message
    assert refusal.value.exit_status == 2


def test_an_unknown_model_type_says_what_the_planner_would_need():
    with pytest.raises(ConfigError) as refusal:
        model_from_config({"model_type": "flux_capacitor"}, name="x", file="/m/config.json")
    message = str(refusal.value)
    assert "/m/config.json" in message
    assert "'flux_capacitor'" in message
    assert "would need" in message
    assert "llama" in message


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no 'model_type'"),
        ('{"model_type": "llama", "torch_dtype": "int5"}', "torch_dtype|num_hidden_layers"),
    ],
)
def test_files_that_are_no_configuration(content, match, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=match):
        read_model(tmp_path / "config.json")


def test_a_path_that_does_not_exist_says_that_nothing_is_downloaded():
    with pytest.raises(ConfigError, match="downloads nothing"):
        read_model("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("value", ["32", 0, -1, 1.5, True])
def test_a_field_of_the_wrong_kind_is_quoted(value):
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    with pytest.raises(ConfigError, match="num_hidden_layers is "):
        model_from_config({**config, "num_hidden_layers": value}, name="x")


def test_a_layer_type_that_is_not_known_is_quoted():
    config = json.loads((CONFIGS / "gpt-oss-20b.json").read_text())
    config["layer_types"] = ["full_attention"] * 23 + ["telepathy"]
    with pytest.raises(ConfigError, match="telepathy"):
        model_from_config(config, name="x")


def test_what_the_class_fills_in_is_told():
    config = json.loads((CONFIGS / "gemma-3-27b.json").read_text())
    text = config["text_config"]
    for field in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        text.pop(field)
    model = model_from_config(config, name="x")
    assert any("num_key_value_heads is not in the file: 4" in note for note in model.assumed)
    llama = json.loads((CONFIGS / "llama-2-7b.json").read_text())
    del llama["num_key_value_heads"]
    assert model_from_config(llama, name="x").assumed


def test_windows_that_are_switched_off_are_not_windows():
    config = json.loads((CONFIGS / "qwen2-7b.json").read_text())
    assert {x.kind for x in model_from_config(config, name="x").layers} == {Kind.FULL}
    on = {**config, "use_sliding_window": True}
    assert {x.kind for x in model_from_config(on, name="x").layers} == {Kind.SLIDING}
    partly = {**on, "max_window_layers": 20}
    with pytest.raises(ConfigError, match="max_window_layers 20 of 28"):
        model_from_config(partly, name="x")


def test_both_ways_to_write_nemotrons_pattern_are_the_same():
    config = json.loads((CONFIGS / "nemotron-h-8b.json").read_text())
    words = {"M": "mamba", "*": "attention", "-": "mlp"}
    listed = [words[letter] for letter in config["hybrid_override_pattern"]]
    other = {**config, "layers_block_type": listed}
    del other["hybrid_override_pattern"]
    assert model_from_config(other, name="x").layers == model_from_config(config, name="x").layers
    other["layers_block_type"] = [*listed[:-1], "telepathy"]
    with pytest.raises(ConfigError, match="hybrid_override_pattern"):
        model_from_config(other, name="x")


@pytest.mark.parametrize(
    ("name", "field"),
    [("granite-4.0-h-small", "layer_types"), ("qwen3-next-80b-a3b", "layer_types")],
)
def test_a_list_of_layers_in_newer_words_means_the_same(name, field):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    layers = model_from_config(config, name="x").layers
    words = [
        "full_attention" if layer.kind is Kind.FULL else "linear_attention" for layer in layers
    ]
    assert model_from_config({**config, field: words}, name="x").layers == layers


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("granite-4.0-h-small", "layer_types"),
        ("qwen3-next-80b-a3b", "layer_types"),
        ("lfm2-1.2b", "layer_types"),
        ("minimax-text-01", "attn_type_list"),
    ],
)
def test_a_kind_of_layer_that_is_not_known_is_not_taken_for_a_state(name, field):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    words = ["telepathy"] * config["num_hidden_layers"]
    with pytest.raises(ConfigError, match=f"{field} has 'telepathy'.*full_attention"):
        model_from_config({**config, field: words}, name="x")


def test_a_nemotron_may_say_by_its_list_alone_how_many_layers_it_has():
    config = json.loads((CONFIGS / "nemotron-h-8b.json").read_text())
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    listed = [words[letter] for letter in config["hybrid_override_pattern"]]
    model = model_from_config(config, name="x")
    other = {**config, "layers_block_type": listed}
    del other["hybrid_override_pattern"], other["num_hidden_layers"]
    again = model_from_config(other, name="x")
    assert again.layers == model.layers
    assert again.num_layers == model.num_layers == len(listed)


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-e4b"])
def test_full_layers_of_gemma_may_be_told_one_by_one(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    text = {**config["text_config"]}
    told = {"head_dim": text.pop("global_head_dim")}
    kv_heads = text.pop("num_global_key_value_heads", None)
    if text.get("attention_k_eq_v") and kv_heads is not None:
        told["num_key_value_heads"] = kv_heads
    full = [i for i, word in enumerate(text["layer_types"]) if word == "full_attention"]
    text["per_layer_config"] = {f"{i:02}": told for i in full}
    layers = model_from_config(config, name="x").layers
    assert model_from_config({**config, "text_config": text}, name="x").layers == layers


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"05": {"head_dim": 256}}, "per_layer_config.*head_dim.*knows none"),
        ({"05": {"num_key_value_heads": 2}}, "per_layer_config.*num_key_value_heads"),
    ],
)
def test_layers_that_differ_in_a_way_that_is_not_known_are_not_planned_as_the_others(told, says):
    config = json.loads((CONFIGS / "qwen3-8b.json").read_text())
    assert model_from_config({**config, "per_layer_config": {"05": {"mlp": 1}}}, name="x").layers
    with pytest.raises(ConfigError, match=says):
        model_from_config({**config, "per_layer_config": told}, name="x")


def test_a_wrapped_draft_model_is_read_through():
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    wrapped = {"model_type": "eagle", "model": {**config, "num_hidden_layers": 1}}
    assert len(model_from_config(wrapped, name="x").layers) == 1


def test_infinity_is_read_as_published_files_have_it(tmp_path):
    text = (CONFIGS / "mamba2-2.7b.json").read_text()
    file = tmp_path / "config.json"
    file.write_text(text.replace("{", '{"time_step_limit": [0.0, Infinity],', 1))
    assert read_model(file).layers == read_model(CONFIGS / "mamba2-2.7b.json").layers


def test_a_dtype_of_null_is_inherited_as_a_missing_one_is():
    config = {
        "model_type": "gemma3",
        "dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "dtype": None, "num_hidden_layers": 2},
    }
    assert model_from_config(config, name="x").dtype == "bfloat16"


def test_windows_that_have_no_size_are_refused():
    config = json.loads((CONFIGS / "cohere2-class-defaults.json").read_text())
    config |= {"sliding_window": None, "layer_types": ["sliding_attention"] * 8}
    with pytest.raises(ConfigError, match="there is no sliding_window"):
        model_from_config(config, name="x")
    full = model_from_config({**config, "layer_types": None}, name="x")
    assert {layer.kind for layer in full.layers} == {Kind.FULL}


@pytest.mark.parametrize("layers", [4097, 10**9, 10**30])
def test_a_number_of_layers_that_no_model_has_is_refused_at_once(layers):
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    with pytest.raises(ConfigError, match=r"num_hidden_layers is .* at most 4096"):
        model_from_config({**config, "num_hidden_layers": layers}, name="x")


@pytest.mark.parametrize("model_type", [["llama"], {"llama": 1}, 5])
def test_a_model_type_that_is_no_text_is_refused(model_type):
    config = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    with pytest.raises(ConfigError, match="is not one that can be planned"):
        model_from_config({**config, "model_type": model_type}, name="x")
