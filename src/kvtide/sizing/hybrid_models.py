"""Builders for models with recurrent layers: Mamba, gated delta net, short convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtide.sizing.attention_models import Built, heads_of, layer_count
from kvtide.sizing.errors import ConfigError
from kvtide.sizing.fields import RUN_DTYPES, Fields
from kvtide.sizing.layers import Attention, Kind, Layer, State

if TYPE_CHECKING:
    from kvtide.sizing.families import Family

__all__ = [
    "falcon_h1",
    "granite_hybrid",
    "jamba",
    "lfm2",
    "mamba1",
    "mamba2",
    "minimax_text_01",
    "nemotron_h",
    "qwen3_next",
]


def _dtype(fields: Fields) -> str:
    return fields.run_dtype("the dtype of the recurrent state")


def _stack(
    fields: Fields, family: Family, is_attention: Callable[[int], bool | None], state: State
) -> Built:
    """One layer of each index: attention where it is true, `state` where it is false."""
    layers: list[Layer] = []
    for i in range(layer_count(fields, family)):
        name = family.layer.format(i=i)
        chosen = is_attention(i)
        if chosen is None:
            continue
        if chosen:
            heads = heads_of(fields, family)
            layers.append(
                Attention(name + family.attn, i, Kind.FULL, heads.kv, heads.dim, heads.dim)
            )
        else:
            layers.append(replace(state, name=name + family.state, index=i))
    return layers, []


# A layer that attends, and one that keeps a state: as model types said it, and as transformers
# writes it for all of them by now.
_ATTENDS = ("attention", "full_attention", 1)
_KEEPS_STATE = ("mamba", "conv", "linear_attention", 0)


def _listed(fields: Fields, count: int, name: str) -> list[bool] | None:
    """Which layers are attention, or None where the file has no such list."""
    values = fields.list_of(name, count)
    if values is None:
        return None
    for value in values:
        if value not in _ATTENDS + _KEEPS_STATE:
            words = ", ".join(map(str, _ATTENDS + _KEEPS_STATE))
            raise ConfigError(
                f"{fields.file}: {name} has {value!r}; the plan of a {fields.model_type} model "
                f"knows {words}"
            )
    return [value in _ATTENDS for value in values]


def qwen3_next(fields: Fields, family: Family) -> Built:
    """Gated delta net, and full attention in every `full_attention_interval`-th layer."""
    count = layer_count(fields, family)
    full = _listed(fields, count, "layer_types")
    if full is None:
        period = fields.integer("full_attention_interval", "layers from one full one to the next")
        full = [(i + 1) % period == 0 for i in range(count)]
    key_heads = fields.integer("linear_num_key_heads", "key heads of a linear layer")
    value_heads = fields.integer("linear_num_value_heads", "value heads of a linear layer")
    key_dim = fields.integer("linear_key_head_dim", "elements of a linear key head")
    value_dim = fields.integer("linear_value_head_dim", "elements of a linear value head")
    dtype = _dtype(fields)
    state_dtype = dtype
    if fields.has("mamba_ssm_dtype"):
        state_dtype = fields.text("mamba_ssm_dtype", "dtype of the recurrent state", RUN_DTYPES)
    state = State(
        "",
        0,
        Kind.GATED_DELTA_NET,
        conv_columns=2 * key_heads * key_dim + value_heads * value_dim,
        conv_kernel=fields.integer("linear_conv_kernel_dim", "width of the convolution"),
        heads=value_heads,
        head_elements=key_dim * value_dim,
        conv_dtype=dtype,
        state_dtype=state_dtype,
    )
    return _stack(fields, family, full.__getitem__, state)


def minimax_text_01(fields: Fields, family: Family) -> Built:
    """Lightning attention (a matrix a head, no convolution), full attention where told."""
    count = layer_count(fields, family)
    full = _listed(fields, count, "attn_type_list")
    if full is None:
        full = _listed(fields, count, "layer_types")
    if full is None:
        raise fields.missing("attn_type_list", "which layers are full attention")
    heads = fields.integer("num_attention_heads", "heads of a lightning layer")
    dim = fields.integer("head_dim", "elements of a head")
    dtype = _dtype(fields)
    state = State("", 0, Kind.LINEAR, 0, 0, heads, dim * dim, dtype, "float32")
    return _stack(fields, family, full.__getitem__, state)


def _mamba1_state(dtype: str, inner: int, state: int, kernel: int) -> State:
    return State("", 0, Kind.MAMBA1, inner, kernel, inner, state, dtype, dtype, conv_grows=False)


def jamba(fields: Fields, family: Family) -> Built:
    """Mamba 1, and attention in one layer of every `attn_layer_period`."""
    period = fields.integer("attn_layer_period", "layers from one attention to the next")
    offset = fields.integer("attn_layer_offset", "the first attention layer", least=0)
    inner = fields.integer("mamba_expand", "inner width of Mamba over hidden_size")
    inner *= fields.integer("hidden_size", "width of the model")
    state = _mamba1_state(
        _dtype(fields),
        inner,
        fields.integer("mamba_d_state", "state elements a channel"),
        fields.integer("mamba_d_conv", "width of the convolution"),
    )
    return _stack(fields, family, lambda i: i % period == offset, state)


def mamba1(fields: Fields, family: Family) -> Built:
    """Mamba 1 in every layer."""
    state = _mamba1_state(
        _dtype(fields),
        fields.integer("intermediate_size", "inner width of Mamba"),
        fields.integer("state_size", "state elements a channel"),
        fields.integer("conv_kernel", "width of the convolution"),
    )
    return _stack(fields, family, lambda _: False, state)


def _mamba2_state(
    fields: Fields, *, inner: int, heads: str, head_dim: str, groups: str, state: str, kernel: str
) -> State:
    dtype = _dtype(fields)
    state_size = fields.integer(state, "state elements a channel")
    return State(
        "",
        0,
        Kind.MAMBA2,
        conv_columns=inner,
        conv_groups=fields.integer(groups, "groups that share B and C"),
        conv_group_columns=2 * state_size,
        conv_kernel=fields.integer(kernel, "width of the convolution"),
        heads=fields.integer(heads, "heads of a Mamba 2 layer"),
        head_elements=fields.integer(head_dim, "channels of a head") * state_size,
        conv_dtype=dtype,
        state_dtype=dtype,
    )


def mamba2(fields: Fields, family: Family) -> Built:
    """Mamba 2 in every layer."""
    inner = fields.integer("expand", "inner width over hidden_size")
    inner *= fields.integer("hidden_size", "width of the model")
    state = _mamba2_state(
        fields,
        inner=inner,
        heads="num_heads",
        head_dim="head_dim",
        groups="n_groups",
        state="state_size",
        kernel="conv_kernel",
    )
    return _stack(fields, family, lambda _: False, state)


def _named_mamba2(fields: Fields, inner: int) -> State:
    return _mamba2_state(
        fields,
        inner=inner,
        heads="mamba_n_heads",
        head_dim="mamba_d_head",
        groups="mamba_n_groups",
        state="mamba_d_state",
        kernel="mamba_d_conv",
    )


def falcon_h1(fields: Fields, family: Family) -> Built:
    """Attention and Mamba 2 side by side in every layer."""
    count = layer_count(fields, family)
    inner = fields.integer_or("mamba_d_ssm", 0)
    if not inner:
        inner = fields.integer("mamba_expand", "inner width over hidden_size")
        inner *= fields.integer("hidden_size", "width of the model")
    state = _named_mamba2(fields, inner)
    heads = heads_of(fields, family)
    layers: list[Layer] = []
    for i in range(count):
        name = family.layer.format(i=i) + family.attn
        layers.append(Attention(name, i, Kind.FULL, heads.kv, heads.dim, heads.dim))
        # vLLM numbers the mixers on from the attention layers, without "layers" in the name.
        layers.append(replace(state, name=f"model.{count + i}.mixer", index=i))
    return layers, []


_NEMOTRON_WORDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def nemotron_h(fields: Fields, family: Family) -> Built:
    """Mamba 2 (M), attention (*) and layers that keep nothing, as the pattern says."""
    words = fields.get("layers_block_type")
    if not fields.has(family.layers_field) and isinstance(words, list):
        fields.derive(family.layers_field, len(words))
    count = layer_count(fields, family)
    pattern = fields.get("hybrid_override_pattern")
    listed = fields.list_of("layers_block_type", count)
    if pattern is None and listed is not None:
        pattern = "".join(_NEMOTRON_WORDS.get(word, "?") for word in listed)
    if not isinstance(pattern, str) or len(pattern) < count or set(pattern) - set("M*-E"):
        if pattern is None:
            raise fields.missing("hybrid_override_pattern", "which layer is of which kind")
        raise ConfigError(
            f"{fields.file}: hybrid_override_pattern is {pattern!r}; the plan needs {count} "
            "letters out of M (Mamba 2), * (attention), - and E (feed forward)"
        )
    heads = fields.integer("mamba_num_heads", "heads of a Mamba 2 layer")
    state = _mamba2_state(
        fields,
        inner=heads * fields.integer("mamba_head_dim", "channels of a head"),
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        groups="n_groups",
        state="ssm_state_size",
        kernel="conv_kernel",
    )
    name = "mamba_ssm_cache_dtype"
    state_dtype = fields.text(name, "", RUN_DTYPES) if fields.has(name) else "float32"
    state = replace(state, state_dtype=state_dtype)
    kinds = {"M": False, "*": True, "-": None, "E": None}
    return _stack(fields, family, lambda i: kinds[pattern[i]], state)


def granite_hybrid(fields: Fields, family: Family) -> Built:
    """Mamba 2, and attention where `layer_types` says so."""
    full = _listed(fields, layer_count(fields, family), "layer_types")
    if full is None:
        raise fields.missing("layer_types", "which layers are attention, which mamba")
    inner = fields.integer("mamba_expand", "inner width over hidden_size")
    inner *= fields.integer("hidden_size", "width of the model")
    return _stack(fields, family, full.__getitem__, _named_mamba2(fields, inner))


def lfm2(fields: Fields, family: Family) -> Built:
    """Short convolutions, and attention in the layers that `full_attn_idxs` lists."""
    count = layer_count(fields, family)
    full = _listed(fields, count, "layer_types")
    if full is None:
        listed = fields.get("full_attn_idxs")
        if not isinstance(listed, list):
            raise fields.missing("full_attn_idxs", "which layers are attention")
        full = [i in listed for i in range(count)]
    columns = fields.integer_or("conv_dim", 0) or fields.integer("hidden_size", "width")
    kernel = fields.integer("conv_L_cache", "width of the convolution")
    dtype = _dtype(fields)
    state = State("", 0, Kind.SHORT_CONV, columns, kernel, 0, 0, dtype, dtype)
    return _stack(fields, family, full.__getitem__, state)
