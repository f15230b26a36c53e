"""vLLM's rule: one pool of equal blocks a rank, which groups of layers take turns on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from kvtide.sizing.groups import Group, PageSpec, group_layers
from kvtide.sizing.layers import Attention, Kind, Layer, State
from kvtide.sizing.model import Model
from kvtide.sizing.packing import pack_layers
from kvtide.sizing.request import PLATFORMS, Request
from kvtide.sizing.rows import Row, stages

__all__ = ["VllmRule"]

# Defaults of an API server by the device's memory (vLLM 0.30): from 70 GiB on, and below.
_LARGE_DEVICE_BYTES = 70 << 30
_LARGE = (8192, 1024)
_SMALL = (2048, 256)
_MLA_HYBRID_MULTIPLE = 128
_REMOVED = dict.fromkeys(
    ("minimax_text_01", "minimax_m1", "minimax"), "vLLM 0.23 and later do not run this"
)


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class _Page(NamedTuple):
    name: str
    spec: PageSpec
    offset: int


@dataclass(frozen=True)
class VllmRule:
    """One model under one request, with `max_model_len` settled.

    The attributes and methods are those that `plan` asks of any engine's rule.
    """

    absent: ClassVar[dict[str, str]] = {}

    model: Model
    request: Request
    kv_dtype: str
    max_model_len: int
    device_bytes: int | None = None

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The model's layers, then those of its draft."""
        layers = (*self.model.layers, *draft_layers(self.model, self.request))
        return tuple(map(self._with_told_dtypes, layers))

    def _with_told_dtypes(self, layer: Layer) -> Layer:
        if not isinstance(layer, State):
            return layer
        conv, state = self.request.conv_dtype, self.request.state_dtype
        return replace(
            layer, conv_dtype=conv or layer.conv_dtype, state_dtype=state or layer.state_dtype
        )

    @cached_property
    def _batch_defaults(self) -> tuple[int, int]:
        small = self.device_bytes is not None and self.device_bytes < _LARGE_DEVICE_BYTES
        return _SMALL if small or self.request.platform == "cpu" else _LARGE

    @cached_property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        return self.request.max_num_seqs or self._batch_defaults[1]

    @cached_property
    def batched_tokens(self) -> int:
        """Tokens of one step at most."""
        given = self.request.max_num_batched_tokens
        if given is not None:
            return given
        return min(self._batch_defaults[0], self.max_num_seqs * self.max_model_len)

    @cached_property
    def _in_flight_tokens(self) -> int:
        batches = PLATFORMS[self.request.platform].batches + self.request.pp - 1
        return batches * self.batched_tokens

    @cached_property
    def _states(self) -> list[State]:
        return [layer for layer in self.layers if isinstance(layer, State)]

    @cached_property
    def _attention(self) -> list[Attention]:
        return [layer for layer in self.layers if isinstance(layer, Attention)]

    @cached_property
    def _is_hybrid(self) -> bool:
        return bool(self._states) and bool(self._attention)

    @cached_property
    def _state_bytes(self) -> int:
        speculative = self.request.speculative_tokens
        return max(layer.bytes(self.request.tp, speculative) for layer in self._states)

    @cached_property
    def block_size(self) -> int:
        """Tokens a block, raised in hybrids until a page of attention holds a state."""
        platform = PLATFORMS[self.request.platform]
        has_mla = any(layer.kind is Kind.MLA for layer in self.model.layers)
        block = self.request.block_size or (platform.mla_block if has_mla else platform.block)
        if has_mla and platform.mla_block_forced:
            block = platform.mla_block
        if not self._is_hybrid:
            return block
        first = next(layer for layer in self._attention if not layer.draft)
        token_bytes = first.token_bytes(self.request.tp, self.kv_dtype)
        multiple = max(platform.kernel_multiple, block)
        if has_mla:
            multiple = max(multiple, _MLA_HYBRID_MULTIPLE)
        return max(block, multiple * _blocks(self._state_bytes, multiple * token_bytes))

    def _page(self, layer: Layer) -> PageSpec:
        tp = self.request.tp
        if isinstance(layer, State):
            state_bytes = layer.bytes(tp, self.request.speculative_tokens)
            padded = None
            if self._is_hybrid:
                first = next(a for a in self._attention if not a.draft)
                page = self.block_size * first.token_bytes(tp, self.kv_dtype)
                padded = page if page != state_bytes else None
            aligned = self._is_hybrid and self.request.prefix_caching
            block = self.block_size if aligned else self.max_model_len
            return PageSpec(layer.kind, block, state_bytes=state_bytes, padded_bytes=padded)
        block, kind = self.block_size, layer.kind
        if kind is Kind.CHUNKED and self.request.draft is not None:
            kind = Kind.FULL  # vLLM keeps all tokens of chunked layers beside a draft model
        if kind is Kind.SLIDING:
            multiple = PLATFORMS[self.request.platform].kernel_multiple
            block = max(multiple, block // multiple * multiple)
        return PageSpec(
            kind,
            block,
            token_bytes=layer.token_bytes(tp, self.kv_dtype),
            shape=(layer.heads(tp), layer.k_dim, layer.v_dim),
            window=None if kind is Kind.FULL else layer.window,
        )

    @cached_property
    def groups(self) -> list[Group]:
        """Cache groups of the whole model; every rank has them, with its own layers."""
        group = pack_layers if self.request.block_outermost else group_layers
        return group([(layer.name, self._page(layer)) for layer in self.layers])

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        split = stages(self.model.num_layers, self.request.pp)
        last = self.request.pp - 1
        owner = {i: stage for stage, held in enumerate(split) for i in held}
        return {
            layer.name: last if layer.draft else owner.get(layer.index, last)
            for layer in self.layers
        }

    def rows(self, stage: int, budget_bytes: int) -> list[Row]:
        """The slabs of a rank of one stage: a page of every block, for each place in a block.

        Where groups take turns, the layers at the same place of each group share a slab.
        """
        return self._rows_of_stages[stage]

    @cached_property
    def _rows_of_stages(self) -> list[list[Row]]:
        return [self._rows(stage) for stage in range(self.request.pp)]

    def _rows(self, stage: int) -> list[Row]:
        laid = [self._laid_out(group, stage) for group in self.groups]
        widest = max(laid, key=lambda held: sum(p.spec.page_bytes for p in held), default=[])
        kinds = {layer.name: layer.kind.value for layer in self.layers}
        drafts = {layer.name for layer in self.layers if layer.draft}
        rows, padding = [], 0
        for lane in widest:
            page, start = lane.spec.page_bytes, lane.offset
            members = [p for held in laid for p in held if start <= p.offset < start + page]
            ends = (p.offset - start + p.spec.content_bytes for p in members)
            content = min(page, max(ends))
            padding += page - content
            names = tuple(p.name for p in members)
            kind = " + ".join(dict.fromkeys(kinds[name] for name in names))
            if drafts.issuperset(names):
                kind = f"draft {kind}"
            rows.append(Row(names[0], kind, names, content, lambda n: n))
        if padding:
            rows.append(Row("page padding", "padding", (), padding, lambda n: n))
        return rows

    def _laid_out(self, group: Group, stage: int) -> list[_Page]:
        """The pages of a group in a block of one stage: those of one spec side by side."""
        by_spec: dict[PageSpec, list[str]] = {}
        for name, spec in zip(group.layers, group.specs, strict=True):
            if self._stage_of[name] == stage:
                by_spec.setdefault(spec, []).append(name)
        pages, offset = [], 0
        for spec, names in by_spec.items():
            for name in names:
                pages.append(_Page(name, spec, offset))
                offset += spec.page_bytes
        return pages

    def sequence_blocks(self, group: Group) -> int:
        """Blocks of one sequence of `max_model_len` in one group."""
        return max(self._layer_blocks(spec) for spec in group.specs)

    def _layer_blocks(self, spec: PageSpec) -> int:
        length, in_flight = self.max_model_len, self._in_flight_tokens
        if spec.is_state:
            states = 2 if self._is_hybrid and self.request.prefix_caching else 1
            return states + self.request.speculative_tokens
        if spec.kind is Kind.SLIDING and spec.window is not None:
            return _blocks(min(spec.window - 1 + in_flight, length), spec.block_size) + 1
        if spec.kind is Kind.CHUNKED and spec.window is not None:
            return _blocks(min(spec.window + in_flight, length), spec.block_size)
        if spec.kind is Kind.CROSS:
            return _blocks(self.batched_tokens, spec.block_size)
        return _blocks(length, spec.block_size)

    @cached_property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence of `max_model_len` in all groups."""
        return sum(map(self.sequence_blocks, self.groups))

    @cached_property
    def required_blocks(self) -> int:
        """The smallest usable cache: one sequence, and the null block that is never given out."""
        return self.blocks_per_sequence + 1

    def usable(self, budget_bytes: int) -> bool:
        """vLLM asks for nothing beside `required_blocks`."""
        return True

    def concurrency(self, blocks: int) -> float:
        """Sequences of `max_model_len` at once, as vLLM prints it."""
        return blocks / self.blocks_per_sequence

    def tokens(self, blocks: int) -> int:
        """Tokens of the cache, as vLLM prints them."""
        return int(self.concurrency(blocks) * self.max_model_len)

    def token_bytes(self, stage: int) -> int:
        """Bytes that a token adds on a rank of one stage, in all its attention layers."""
        return sum(
            layer.token_bytes(self.request.tp, self.kv_dtype)
            for layer in self._attention
            if self._stage_of[layer.name] == stage
        )

    def engine_tokens(self, stage: int, budget_bytes: int, blocks: int) -> int:
        """What the engine itself prints: the plan follows it to the token."""
        return self.tokens(blocks)

    @cached_property
    def notes(self) -> list[str]:
        """What a reader should know of how the figures came about."""
        notes = []
        if self.model.model_type in _REMOVED:
            notes.append(f"{_REMOVED[self.model.model_type]}: the figures are by its rule of then")
        asked = self.request.block_size
        if asked is not None and self.block_size != asked:
            notes.append(
                f"block size {asked} was asked for: {self.block_size} is what vLLM takes"
                + (", so that a page of attention holds a state" if self._is_hybrid else "")
            )
        if self._states:
            states = sum(
                self.sequence_blocks(group) for group in self.groups if group.specs[0].is_state
            )
            notes.append(
                f"states live in the blocks: {states} blocks a sequence, "
                f"{states * self.max_num_seqs} for max_num_seqs {self.max_num_seqs}"
            )
        windows = {layer.window for layer in self._attention if layer.window}
        if windows and len(self.groups) > 1 and self.request.max_num_batched_tokens is None:
            notes.append(
                f"a window keeps up to max_num_batched_tokens {self.batched_tokens} a step in "
                "flight (vLLM's default for this device; give it to be exact)"
            )
        unequal = {len(group.layers) for group in self.groups}
        if len(unequal) > 1:
            notes.append(
                f"groups of {min(unequal)} to {max(unequal)} layers share the blocks: the smaller "
                "ones leave a part of each block unused"
            )
        return notes


def draft_layers(model: Model, request: Request) -> Sequence[Layer]:
    """The layers that draft: the draft model's, else the model's own, if any."""
    if not request.speculative_tokens:
        return ()
    if request.draft is None:
        return model.own_drafts
    drafts = []
    for layer in request.draft.layers:
        # Engines count a draft model's layers on from the target's.
        index = model.num_layers + layer.index
        name = layer.name.replace(f".{layer.index}.", f".{index}.", 1)
        drafts.append(replace(layer, name=name, index=index, draft=True))
    return drafts
