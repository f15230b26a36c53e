"""The kinds of layers that keep something between steps, and their bytes on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtide.sizing.errors import ConfigError

__all__ = ["DTYPE_BYTES", "Attention", "Kind", "Layer", "Shared", "State"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


class Kind(str, Enum):
    """What a layer keeps. The value is the word that tables and JSON use."""

    FULL = "full_attention"
    SLIDING = "sliding_window"
    CHUNKED = "chunked_attention"
    MLA = "mla"
    INDEXER = "mla_indexer"
    CROSS = "cross_attention"
    MAMBA1 = "mamba1"
    MAMBA2 = "mamba2"
    GATED_DELTA_NET = "gated_delta_net"
    LINEAR = "linear_attention"
    SHORT_CONV = "short_convolution"


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer that keeps bytes for every token.

    Parameters
    ----------
    name
        The engine's own name of the layer.
    index
        The decoder layer it belongs to: pipeline stages split by it.
    kv_heads, k_dim, v_dim
        Heads of the whole model, elements of K and of V a head. MLA's latent is one head with
        `v_dim` 0.
    replicated
        Every tensor parallel rank holds all of it (MLA, its indexer).
    window
        Tokens that a sliding window or an attention chunk covers.
    token_bytes_fixed
        Bytes a token whatever the KV dtype (the indexer's fp8 keys and their scales).
    token_bytes_fp8
        Bytes a token under an fp8 KV dtype, where that is not one byte an element (DSA's 656).
    draft
        It belongs to a draft model or to the model's own draft heads.
    """

    name: str
    index: int
    kind: Kind
    kv_heads: int
    k_dim: int
    v_dim: int
    replicated: bool = False
    window: int | None = None
    token_bytes_fixed: int | None = None
    token_bytes_fp8: int | None = None
    draft: bool = False

    def heads(self, tp: int) -> int:
        """KV heads on one of `tp` ranks: split, or replicated when there are fewer than ranks."""
        if self.replicated:
            return self.kv_heads
        if max(self.kv_heads, tp) % min(self.kv_heads, tp):
            raise ConfigError(
                f"{self.name}: {self.kv_heads} KV heads cannot be split or replicated over "
                f"{tp} tensor parallel ranks: one must divide the other"
            )
        return max(1, self.kv_heads // tp)

    def token_bytes(self, tp: int, kv_dtype: str) -> int:
        """Bytes of one token on one rank, K and V together."""
        if self.token_bytes_fixed is not None:
            return self.token_bytes_fixed
        if kv_dtype == "fp8" and self.token_bytes_fp8 is not None:
            return self.token_bytes_fp8
        return self.heads(tp) * (self.k_dim + self.v_dim) * DTYPE_BYTES[kv_dtype]


@dataclass(frozen=True, slots=True)
class State:
    """A layer that keeps a recurrent state for every sequence: a convolution and a matrix.

    Parameters
    ----------
    conv_columns, conv_groups, conv_group_columns
        Columns of the convolution: a part that is split over ranks, and groups that are split
        too but extended to the number of ranks where they do not divide (Mamba 2).
    conv_kernel
        Its width; it keeps one row less, and one more for every speculative token where
        `conv_grows`.
    heads, head_elements
        Heads of the recurrent matrix (0: there is none) and elements in each.
    conv_dtype, state_dtype
        Keys of `DTYPE_BYTES`.
    """

    name: str
    index: int
    kind: Kind
    conv_columns: int
    conv_kernel: int
    heads: int
    head_elements: int
    conv_dtype: str
    state_dtype: str
    conv_groups: int = 0
    conv_group_columns: int = 0
    conv_grows: bool = True
    draft: bool = False

    def _split(self, count: int, tp: int) -> int:
        if count % tp:
            raise ConfigError(
                f"{self.name}: a {self.kind.value} state of {count} columns or heads cannot be "
                f"split over {tp} tensor parallel ranks"
            )
        return count // tp

    def bytes(self, tp: int, speculative_tokens: int) -> int:
        """Bytes of one state on one rank."""
        groups = self.conv_groups
        if groups % tp:
            groups = tp
        rows = self.conv_kernel - 1 if self.conv_columns else 0
        if rows and self.conv_grows:
            rows += speculative_tokens
        columns = self._split(self.conv_columns + groups * self.conv_group_columns, tp)
        return (
            rows * columns * DTYPE_BYTES[self.conv_dtype]
            + self._split(self.heads, tp) * self.head_elements * DTYPE_BYTES[self.state_dtype]
        )


Layer = Attention | State


@dataclass(frozen=True, slots=True)
class Shared:
    """A layer that keeps nothing itself: it reads the KV of an earlier one."""

    name: str
    index: int
    kind: Kind
    of: str
