"""vLLM's cache groups: which layers share a block table, a page size and the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtide.sizing.errors import ConfigError
from kvtide.sizing.layers import Kind

__all__ = ["Group", "PageSpec", "group_layers", "same_type"]

_TOKEN_KINDS = (Kind.FULL, Kind.MLA, Kind.INDEXER)
_STATES = (Kind.MAMBA1, Kind.MAMBA2, Kind.GATED_DELTA_NET, Kind.LINEAR, Kind.SHORT_CONV)


@dataclass(frozen=True, slots=True)
class PageSpec:
    """What one layer asks of a block.

    Parameters
    ----------
    block_size
        Tokens in a block; for a state, the tokens between two of its states.
    token_bytes
        Bytes a token on this rank, 0 for a state.
    state_bytes
        Bytes of one state, 0 for attention.
    shape
        What must be equal for two layers to be in one group besides all the rest.
    padded_bytes
        The page size where it is more than the content.
    """

    kind: Kind
    block_size: int
    token_bytes: int = 0
    state_bytes: int = 0
    shape: tuple[int | str, ...] = ()
    window: int | None = None
    padded_bytes: int | None = None

    @property
    def content_bytes(self) -> int:
        """Bytes of a page that the layer uses."""
        return self.state_bytes + self.token_bytes * self.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, with its padding."""
        return self.content_bytes if self.padded_bytes is None else self.padded_bytes

    @property
    def is_state(self) -> bool:
        """Whether it keeps a state a sequence, not bytes a token."""
        return self.kind in _STATES


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table, and what each asks of a block."""

    layers: tuple[str, ...]
    specs: tuple[PageSpec, ...]


def same_type(specs: Sequence[PageSpec]) -> bool:
    """Whether all need the same token slots, so that one block table serves them."""
    first = specs[0]
    if any(spec.block_size != first.block_size for spec in specs):
        return False
    if first.kind in _TOKEN_KINDS:
        return all(spec.kind in _TOKEN_KINDS for spec in specs)
    if first.is_state:
        return all(spec.is_state and spec.page_bytes == first.page_bytes for spec in specs)
    return all(spec.kind is first.kind and spec.window == first.window for spec in specs)


def _unify(specs: list[PageSpec]) -> list[PageSpec]:
    """Give all the largest page: by more tokens a block where that divides, else by padding."""
    largest = max(spec.page_bytes for spec in specs)
    unified = []
    for spec in specs:
        if spec.page_bytes == largest:
            unified.append(spec)
        elif not spec.is_state and largest % spec.page_bytes == 0:
            ratio = largest // spec.page_bytes
            unified.append(replace(spec, block_size=spec.block_size * ratio))
        elif spec.kind in (Kind.MLA, Kind.INDEXER):
            raise ConfigError(
                f"vLLM cannot give all layers one page: {spec.kind.value} pages of "
                f"{spec.page_bytes} bytes neither divide {largest} nor can be padded"
            )
        else:
            unified.append(replace(spec, padded_bytes=largest))
    return unified


def group_layers(named: Sequence[tuple[str, PageSpec]]) -> list[Group]:
    """Group layers as vLLM 0.29 and later do for layer-outermost layouts.

    One group where one block table can serve all. Otherwise pages are made equal, layers of one
    kind are cut into groups as large as the rarest kind (or as the most frequent, where that is
    less than half as many again), and the groups take turns on the same bytes.
    """
    names = [name for name, _ in named]
    specs = [spec for _, spec in named]
    if not specs:
        return []
    if same_type(specs):
        return [Group(tuple(names), tuple(specs))]
    buckets: dict[PageSpec, list[str]] = {}
    for name, spec in zip(names, _unify(specs), strict=True):
        buckets.setdefault(spec, []).append(name)
    fewest = min(map(len, buckets.values()))
    most = max(map(len, buckets.values()))
    size = most if most < fewest * 1.5 else fewest
    groups = []
    for spec, members in buckets.items():
        count = -(-len(members) // size)
        for i in range(count):
            taken = tuple(members[i::count])
            groups.append(Group(taken, (spec,) * len(taken)))
    return groups
