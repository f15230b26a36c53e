"""Builders for models of attention layers alone: plain, windowed, MLA, shared, cross."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvtide.sizing.errors import ConfigError
from kvtide.sizing.fields import Fields
from kvtide.sizing.layers import Attention, Kind, Layer, Shared

if TYPE_CHECKING:
    from kvtide.sizing.families import Family

__all__ = [
    "Heads",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt_oss",
    "heads_of",
    "layer_count",
    "layer_types",
    "llama4",
    "mla",
    "patterned",
    "plain",
    "whisper",
]

# More than any model has; the time that a plan takes grows with them.
_MOST_LAYERS = 4096

Built = tuple[list[Layer], list[Shared]]

_WORDS = {
    "full_attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "chunked_attention": Kind.CHUNKED,
}


class Heads(NamedTuple):
    """KV heads of a layer and elements in each of K and V."""

    kv: int
    dim: int


def heads_of(fields: Fields, family: Family) -> Heads:
    """KV heads and head size, from their own fields or as the model type's class derives them."""

    def attention_heads() -> int:
        return fields.integer("num_attention_heads", "attention heads of a layer")

    if fields.get("num_key_value_heads") is None and "num_key_value_heads" in family.derives:
        fields.assume("num_key_value_heads", attention_heads(), "num_attention_heads")
    if fields.get("head_dim") is None and "head_dim" in family.derives:
        hidden = fields.integer("hidden_size", "with num_attention_heads, the size of a head")
        fields.derive("head_dim", hidden // attention_heads())
    return Heads(
        fields.integer("num_key_value_heads", "KV heads of a layer"),
        fields.integer("head_dim", "elements of a head"),
    )


def layer_types(fields: Fields, count: int, default: Callable[[int], Kind]) -> list[Kind]:
    """The kind of every layer: `layer_types` of the file, else the class's own pattern."""
    listed = fields.list_of("layer_types", count)
    if listed is None:
        return [default(i) for i in range(count)]
    unknown = next((word for word in listed if word not in _WORDS), None)
    if unknown is not None:
        raise ConfigError(
            f"{fields.file}: layer_types has {unknown!r}; the plan of a {fields.model_type} model "
            f"knows {', '.join(_WORDS)}"
        )
    return [_WORDS[word] for word in listed]


def layer_count(fields: Fields, family: Family) -> int:
    """How many decoder layers there are."""
    return fields.integer(family.layers_field, "the number of decoder layers", most=_MOST_LAYERS)


def _windowed(fields: Fields, family: Family, kinds: list[Kind], window: int) -> list[Layer]:
    heads = heads_of(fields, family)
    return [
        Attention(
            family.layer.format(i=i) + family.attn,
            i,
            kind,
            heads.kv,
            heads.dim,
            heads.dim,
            window=None if kind is Kind.FULL else window,
        )
        for i, kind in enumerate(kinds)
    ]


def plain(fields: Fields, family: Family) -> Built:
    """The same attention in every layer; a `sliding_window` that is in use holds for all."""
    count = layer_count(fields, family)
    window = fields.integer_or("sliding_window", 0)
    if fields.data.get("use_sliding_window") is False:
        window = 0
    elif fields.data.get("use_sliding_window") is True:
        from_layer = fields.integer_or("max_window_layers", count)
        if window and from_layer != count:
            raise ConfigError(
                f"{fields.file}: use_sliding_window with max_window_layers {from_layer} of {count} "
                "layers: engines do not run windows in a part of these models' layers"
            )
    kinds = layer_types(fields, count, lambda _: Kind.SLIDING if window else Kind.FULL)
    return _windowed(fields, family, kinds, window), []


def patterned(fields: Fields, family: Family) -> Built:
    """Windows by `layer_types`, else all but every n-th layer; none without a `sliding_window`."""
    count = layer_count(fields, family)
    window = fields.integer_or("sliding_window", 0)
    period = 1
    if window and not fields.has("layer_types"):
        period = fields.integer("sliding_window_pattern", "layers from one full one to the next")
    kinds = layer_types(fields, count, lambda i: Kind.SLIDING if (i + 1) % period else Kind.FULL)
    if not window and Kind.SLIDING in kinds:
        raise ConfigError(
            f"{fields.file}: layer_types has 'sliding_attention', and there is no sliding_window"
        )
    return _windowed(fields, family, kinds, window), []


def gemma2(fields: Fields, family: Family) -> Built:
    """Every other layer slides, the first one does."""
    kinds = layer_types(
        fields, layer_count(fields, family), lambda i: Kind.FULL if i % 2 else Kind.SLIDING
    )
    return _windowed(fields, family, kinds, fields.integer("sliding_window", "window tokens")), []


gpt_oss = gemma2


def gemma3(fields: Fields, family: Family) -> Built:
    """Every sixth layer is full."""
    count = layer_count(fields, family)
    period = 1
    if not fields.has("layer_types"):
        period = fields.integer("sliding_window_pattern", "layers from one full one to the next")
    kinds = layer_types(fields, count, lambda i: Kind.SLIDING if (i + 1) % period else Kind.FULL)
    return _windowed(fields, family, kinds, fields.integer("sliding_window", "window tokens")), []


def llama4(fields: Fields, family: Family) -> Built:
    """Layers with rotary positions attend in chunks; every fourth, without, attends fully."""
    count = layer_count(fields, family)
    rope = fields.list_of("no_rope_layers", count)
    if not rope:
        period = fields.integer_or("no_rope_layer_interval", 4)
        rope = [int((i + 1) % period != 0) for i in range(count)]
    kinds = [Kind.CHUNKED if rotary else Kind.FULL for rotary in rope]
    chunk = fields.integer("attention_chunk_size", "tokens that one attention chunk covers")
    return _windowed(fields, family, kinds, chunk), []


def _share(layers: list[Layer], shared_count: int) -> Built:
    """The last layers read the KV of the last one of their kind that has its own."""
    kept = layers[: len(layers) - shared_count]
    last = {layer.kind: layer.name for layer in kept}
    shared = [
        Shared(layer.name, layer.index, layer.kind, last[layer.kind])
        for layer in layers[len(kept) :]
    ]
    return kept, shared


def gemma3n(fields: Fields, family: Family) -> Built:
    """Every fifth layer is full; the last `num_kv_shared_layers` have no KV of their own."""
    kinds = layer_types(
        fields, layer_count(fields, family), lambda i: Kind.SLIDING if (i + 1) % 5 else Kind.FULL
    )
    window = fields.integer("sliding_window", "window tokens")
    shared = fields.integer("num_kv_shared_layers", "layers without KV of their own", least=0)
    return _share(_windowed(fields, family, kinds, window), shared)


def gemma4(fields: Fields, family: Family) -> Built:
    """Full layers have larger heads, and with `attention_k_eq_v` their own number of them.

    Published files say so of all of them; newer transformers writes it layer by layer.
    """
    count = layer_count(fields, family)
    kinds = layer_types(fields, count, lambda i: Kind.SLIDING if (i + 1) % 6 else Kind.FULL)
    sliding = Heads(
        fields.integer("num_key_value_heads", "KV heads of a sliding layer"),
        fields.integer("head_dim", "elements of a sliding layer's head"),
    )
    own = {
        i: Heads(
            layer.integer_or("num_key_value_heads", sliding.kv),
            layer.integer_or("head_dim", sliding.dim),
        )
        for i, layer in fields.one_by_one().items()
    }
    if not own:
        full = Heads(
            fields.integer_or("num_global_key_value_heads", sliding.kv)
            if fields.data.get("attention_k_eq_v")
            else sliding.kv,
            fields.integer("global_head_dim", "elements of a full layer's head"),
        )
        own = {i: full for i, kind in enumerate(kinds) if kind is Kind.FULL}
    window = fields.integer("sliding_window", "window tokens")
    layers: list[Layer] = []
    for i, kind in enumerate(kinds):
        heads = own.get(i, sliding)
        name = family.layer.format(i=i) + family.attn
        width = None if kind is Kind.FULL else window
        layers.append(Attention(name, i, kind, heads.kv, heads.dim, heads.dim, window=width))
    return _share(layers, fields.integer_or("num_kv_shared_layers", 0))


# A DSA layer's fp8 row: 512 fp8 latents, 4 float32 scales, 64 bfloat16 rotary elements.
_DSA_FP8_BYTES = 656
# The indexer keeps fp8 keys with a float32 scale for every 128 of them, whatever the KV dtype.
_INDEX_GROUP = 128


def mla(fields: Fields, family: Family) -> Built:
    """One latent a token in every layer, on every rank; with a DSA indexer, its keys too."""
    count = layer_count(fields, family)
    latent = fields.integer("kv_lora_rank", "latent elements of a token")
    rope = fields.integer("qk_rope_head_dim", "rotary elements of a token")
    sparse = fields.has("index_topk")
    index_dim = fields.integer("index_head_dim", "elements of an indexer key") if sparse else 0
    layers: list[Layer] = []
    for i in range(count):
        name = family.layer.format(i=i)
        layers.append(
            Attention(
                name + family.attn,
                i,
                Kind.MLA,
                1,
                latent + rope,
                0,
                replicated=True,
                token_bytes_fp8=_DSA_FP8_BYTES if sparse else None,
            )
        )
        if sparse:
            key_bytes = index_dim + index_dim // _INDEX_GROUP * 4
            layers.append(
                Attention(
                    f"{name}.self_attn.indexer.k_cache",
                    i,
                    Kind.INDEXER,
                    1,
                    key_bytes,
                    0,
                    replicated=True,
                    token_bytes_fixed=key_bytes,
                )
            )
    return layers, []


def whisper(fields: Fields, family: Family) -> Built:
    """A decoder whose layers attend to themselves and to the encoder's output."""
    count = layer_count(fields, family)
    heads = fields.integer("decoder_attention_heads", "attention heads of a decoder layer")
    dim = fields.integer("d_model", "with the heads, the size of a head") // heads
    layers: list[Layer] = []
    for i in range(count):
        name = family.layer.format(i=i)
        layers.append(Attention(f"{name}.self_attn.attn", i, Kind.FULL, heads, dim, dim))
        layers.append(Attention(f"{name}.encoder_attn.attn", i, Kind.CROSS, heads, dim, dim))
    return layers, []
