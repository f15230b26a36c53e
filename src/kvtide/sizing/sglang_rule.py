"""SGLang's rule: buffers of tokens a layer, with states and windows in pools of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from kvtide.sizing.layers import Attention, Kind, Layer, State
from kvtide.sizing.model import Model
from kvtide.sizing.request import Request
from kvtide.sizing.rows import UNBOUNDED, Row, invert, stages, total_bytes
from kvtide.sizing.vllm_rule import draft_layers

__all__ = ["SglangRule"]

# SGLang 0.5.20. Only these architectures get a pool of their own for windows; in all others a
# layer with a window keeps every token.
_WINDOW_POOLS = frozenset({"gpt_oss", "llama4_text", "gemma4_text"})
_WINDOW_RATIO = Fraction(8, 10)  # swa_full_tokens_ratio
_STATE_RATIO = Fraction(9, 10)  # mamba_full_memory_ratio
_STATES_PER_REQUEST = 3  # one that runs, the others for the prefix cache
_SPECULATIVE_REQUESTS = 48  # max_running_requests where speculation is on and none is given
_DSA_PAGE = 64


@dataclass(frozen=True)
class SglangRule:
    """One model under one request; the same questions as `VllmRule` answers."""

    absent: ClassVar[dict[str, str]] = dict.fromkeys(
        ("jamba", "minimax_text_01", "minimax_m1", "minimax"),
        "SGLang 0.5.20 has no implementation of it",
    )

    model: Model
    request: Request
    kv_dtype: str
    max_model_len: int
    device_bytes: int | None = None

    @cached_property
    def block_size(self) -> int:
        """SGLang's page size: one token unless told, 64 with a DSA indexer."""
        sparse = any(layer.kind is Kind.INDEXER for layer in self.model.layers)
        return self.request.block_size or (_DSA_PAGE if sparse else 1)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers with memory: those that share KV and those of an encoder have buffers too."""
        by_name = {layer.name: layer for layer in self.model.layers}
        shared: list[Layer] = []
        for layer in self.model.shared:
            of = by_name[layer.of]
            assert isinstance(of, Attention)
            shared.append(
                Attention(
                    layer.name,
                    layer.index,
                    layer.kind,
                    of.kv_heads,
                    of.k_dim,
                    of.v_dim,
                    window=of.window,
                )
            )
        encoder: list[Layer] = [
            replace(self.model.layers[0], name=f".encoder.layers.{i}.self_attn", index=0)
            for i in range(self.model.encoder_layers)
        ]
        drafts = draft_layers(self.model, self.request)
        return tuple(map(self._in_sglang, (*encoder, *self.model.layers, *shared, *drafts)))

    def _in_sglang(self, layer: Layer) -> Layer:
        """SGLang's dtypes of states: bfloat16 convolutions, float32 matrices unless told."""
        if isinstance(layer, Attention):
            return layer
        return replace(layer, conv_dtype="bfloat16", state_dtype=self.model.ssm_dtype or "float32")

    @cached_property
    def _split(self) -> list[range]:
        return stages(self.model.num_layers, self.request.pp)

    def _held(self, stage: int) -> list[Layer]:
        last = stage == self.request.pp - 1
        return [
            layer
            for layer in self.layers
            if (last if layer.draft else layer.index in self._split[stage])
        ]

    def _token_layers(self, stage: int) -> list[Attention]:
        return [layer for layer in self._held(stage) if isinstance(layer, Attention)]

    def _in_window_pool(self, layer: Attention) -> bool:
        return self.model.model_type in _WINDOW_POOLS and layer.window is not None

    def _slot_bytes(self, stage: int) -> int:
        return sum(
            layer.bytes(self.request.tp, 0)
            for layer in self._held(stage)
            if isinstance(layer, State)
        )

    @cached_property
    def max_num_seqs(self) -> int:
        """`max_running_requests`."""
        fallback = _SPECULATIVE_REQUESTS if self.request.speculative_tokens else UNBOUNDED
        return self.request.max_num_seqs or fallback

    def _state_share(self, budget_bytes: int) -> int:
        share = _STATE_RATIO / (1 + _STATE_RATIO)
        return budget_bytes * share.numerator // share.denominator

    def _state_rows(self, stage: int, slots: int | None) -> list[Row]:
        """States for `slots` slots, or, where it is None, for as many as the blocks say."""
        drafts = self.request.speculative_tokens + 1 if self.request.speculative_tokens else 0

        def kept(n: int) -> int:
            return (n if slots is None else slots) + 1

        def speculative(n: int) -> int:
            running = min(self.max_num_seqs, (kept(n) - 1) // _STATES_PER_REQUEST)
            return (running + 1) * drafts

        rows = []
        for layer in self._held(stage):
            if not isinstance(layer, State):
                continue
            state_bytes = layer.bytes(self.request.tp, 0)
            names = (layer.name,)
            rows.append(Row(layer.name, layer.kind.value, names, state_bytes, kept))
            if drafts:
                name = f"{layer.name} speculative"
                kind = f"speculative {layer.kind.value}"
                rows.append(Row(name, kind, names, state_bytes, speculative))
        return rows

    def slots(self, budget_bytes: int) -> int:
        """State slots, the same on all ranks: as many as their share of the budget holds."""
        most = max(range(self.request.pp), key=self._slot_bytes)
        if not self._slot_bytes(most):
            return 0
        return invert(self._state_rows(most, None), self._state_share(budget_bytes))

    def rows(self, stage: int, budget_bytes: int) -> list[Row]:
        """K and V of every layer with the pages that padding writes to, windows, and states.

        What the states' share leaves of itself is a row too, so that more memory never gives
        fewer tokens.
        """
        page = self.block_size
        rows: list[Row] = []
        padding = 0

        def tokens(n: int) -> int:
            return n * page

        def windowed(n: int) -> int:
            return n * page * _WINDOW_RATIO.numerator // _WINDOW_RATIO.denominator // page * page

        all_windowed = all(self._in_window_pool(layer) for layer in self._token_layers(stage))
        for layer in self._token_layers(stage):
            token_bytes = layer.token_bytes(self.request.tp, self.kv_dtype)
            padding += token_bytes * page
            kind = f"draft {layer.kind.value}" if layer.draft else layer.kind.value
            window = self._in_window_pool(layer) and not all_windowed
            count: Callable[[int], int] = windowed if window else tokens
            names = (layer.name,)
            if layer.v_dim == 0:
                rows.append(Row(layer.name, kind, names, token_bytes, count))
                continue
            k_bytes = token_bytes * layer.k_dim // (layer.k_dim + layer.v_dim)
            rows.append(Row(f"{layer.name} K", kind, names, k_bytes, count))
            rows.append(Row(f"{layer.name} V", kind, names, token_bytes - k_bytes, count))
        if padding:
            rows.append(Row("padding page", "padding", (), padding, lambda _: 1))
        if any(isinstance(layer, State) for layer in self.layers):
            states = self._state_rows(stage, self.slots(budget_bytes))
            left = self._state_share(budget_bytes) - total_bytes(states, 0)
            rows.extend(states)
            if left > 0:
                rows.append(Row("left of the states' share", "unused", (), left, lambda _: 1))
        return rows

    @cached_property
    def blocks_per_sequence(self) -> int:
        """Pages of one sequence of `max_model_len`."""
        return -(-self.max_model_len // self.block_size)

    @cached_property
    def required_blocks(self) -> int:
        """The smallest usable cache: the pages of one sequence."""
        return self.blocks_per_sequence

    def usable(self, budget_bytes: int) -> bool:
        """Whether the states of one request fit their share."""
        has_states = any(isinstance(layer, State) for layer in self.layers)
        return not has_states or self.slots(budget_bytes) >= _STATES_PER_REQUEST

    def concurrency(self, blocks: int) -> float:
        """Sequences of `max_model_len` at once."""
        return blocks / self.blocks_per_sequence

    def tokens(self, blocks: int) -> int:
        """`max_total_num_tokens`."""
        return blocks * self.block_size

    def token_bytes(self, stage: int) -> int:
        """SGLang's cell: bytes that a token adds on a rank, a window's at its ratio."""
        layers = self._token_layers(stage)
        full = [layer for layer in layers if not self._in_window_pool(layer)]
        ratio = _WINDOW_RATIO if full else Fraction(1)
        cell = Fraction(0)
        for layer in layers:
            token_bytes = layer.token_bytes(self.request.tp, self.kv_dtype)
            cell += token_bytes * (ratio if self._in_window_pool(layer) else 1)
        return int(cell)

    def engine_tokens(self, stage: int, budget_bytes: int, blocks: int) -> int:
        """What SGLang itself prints: it does not count padding pages, nor keep the share."""
        kept = [row for row in self.rows(stage, budget_bytes) if row.kind not in _UNCOUNTED]
        return max(0, invert(kept, budget_bytes)) * self.block_size

    @cached_property
    def notes(self) -> list[str]:
        """What a reader should know of how the figures came about."""
        notes = []
        windows = [x for x in self.layers if isinstance(x, Attention) and x.window]
        if windows and not self._in_window_pool(windows[0]):
            notes.append(
                f"SGLang keeps every token of the {len(windows)} layers with a window: "
                f"{self.model.model_type} has no window pool"
            )
        if self.model.shared:
            notes.append(
                f"SGLang gives the {len(self.model.shared)} layers that share KV buffers of "
                "their own"
            )
        return notes


_UNCOUNTED = ("padding", "unused")
