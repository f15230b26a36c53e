"""vLLM's grouping for block-outermost layouts: pages of several sizes side by side in a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtide.sizing.groups import Group, PageSpec, group_layers, same_type
from kvtide.sizing.layers import Kind

__all__ = ["pack_layers"]

Named = tuple[str, PageSpec]


@dataclass(frozen=True)
class _Bucket:
    """Layers that one block table can serve, by their page sizes."""

    layers: list[Named]

    @property
    def by_page(self) -> dict[int, list[Named]]:
        pages: dict[int, list[Named]] = {}
        for name, spec in self.layers:
            pages.setdefault(spec.page_bytes, []).append((name, spec))
        return pages

    @property
    def balanced(self) -> bool:
        """Whether it repeats a pattern of one layer of each page size."""
        return len({len(members) for members in self.by_page.values()}) == 1

    @property
    def repeats(self) -> int:
        return max(len(members) for members in self.by_page.values())

    def widest_bytes(self, groups: int) -> int:
        """Page bytes of the largest of the groups that it is cut into."""
        return sum(-(-len(members) // groups) * page for page, members in self.by_page.items())


def _least_padding(values: Sequence[int], least: int) -> int:
    """The divisor from `least` on that rounds the values up by the least; the larger of equals."""
    candidates = range(max(1, least), max(values) + 1)
    if not candidates:
        return least
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d))


def _buckets(named: Sequence[Named]) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    for name, spec in named:
        for bucket in buckets:
            if same_type([*(s for _, s in bucket.layers), spec]):
                bucket.layers.append((name, spec))
                break
        else:
            buckets.append(_Bucket([(name, spec)]))
    return buckets


def pack_layers(named: Sequence[Named]) -> list[Group]:
    """Group layers as vLLM does where a block holds all its layers' pages in one run.

    With one page size, or one block table for all, this is `group_layers`. Otherwise pages keep
    their sizes: layers of one kind are cut into groups that repeat the same pattern, and states
    and windows into as many as fit the block that the others need.
    """
    specs = [spec for _, spec in named]
    if len({spec.page_bytes for spec in specs}) <= 1 or same_type(specs):
        return group_layers(named)
    buckets = _buckets(named)
    balanced = [bucket for bucket in buckets if bucket.balanced]
    mixed = [bucket.repeats for bucket in balanced if len(bucket.by_page) > 1]
    repeats = _least_padding([b.repeats for b in balanced], max(mixed)) if mixed else None

    def is_state(bucket: _Bucket) -> bool:
        first = bucket.layers[0][1]
        return first.is_state or (repeats is None and first.kind is Kind.SLIDING)

    def count(bucket: _Bucket) -> int:
        cut = bucket.balanced and repeats is not None
        return -(-bucket.repeats // repeats) if cut and repeats else 1

    block_bytes = max(
        bucket.widest_bytes(len(bucket.layers) if is_state(bucket) else count(bucket))
        for bucket in buckets
    )
    groups = []
    for bucket in buckets:
        cuts = count(bucket)
        if is_state(bucket):
            a_block = max(block_bytes // bucket.layers[0][1].page_bytes, 1)
            cuts = max(cuts, -(-len(bucket.layers) // a_block))
        if cuts == 1:
            groups.append(_group(bucket.layers))
            continue
        patterns = list(zip(*bucket.by_page.values(), strict=False))
        groups.extend(
            _group([layer for pattern in patterns[i::cuts] for layer in pattern])
            for i in range(cuts)
        )
    return groups


def _group(layers: Sequence[Named]) -> Group:
    return Group(tuple(name for name, _ in layers), tuple(spec for _, spec in layers))
