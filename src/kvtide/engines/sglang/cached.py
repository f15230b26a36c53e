"""What SGLang's radix tree holds of one kind of slots, and how chosen ones are evicted from it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

__all__ = ["Cached", "cached_by"]

Mask = npt.NDArray[np.bool_]
_FULL, _WINDOW, _STATE = "full", "swa", "mamba"


class _Held(NamedTuple):
    """A node of the tree that nothing locks, and its blocks by number."""

    node: Any
    blocks: npt.NDArray[np.int64]


class Cached:
    """A prefix cache that holds nothing: there is none."""

    count = 0

    def ids(self) -> list[int]:
        """The numbers of the blocks held, first to be evicted first."""
        return []

    def drop(self, gone: Mask) -> None:
        """Evict at least the blocks that are marked."""


class _Tree(Cached):
    """One component of SGLang's unified radix tree.

    Parameters
    ----------
    tree
        SGLang's `UnifiedRadixCache`.
    kind
        `full`, `swa` or `mamba`.
    page_size
        Slots of a block.
    """

    def __init__(self, tree: Any, kind: str, page_size: int) -> None:
        self._tree = tree
        self._core = tree.tree_core
        self._component = next(c for c in tree.tree_components if str(c) == kind)
        self._page_size = page_size

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many blocks only the cache holds."""
        evictable: int = self._core.component_evictable_size(self._component)
        return evictable // self._page_size

    def ids(self) -> list[int]:
        """The numbers of these blocks, first to be evicted first."""
        return [number for held in self._in_order() for number in held.blocks[::-1].tolist()]

    def _blocks(self, node: Any) -> npt.NDArray[np.int64]:
        slots = node.component_data[self._component].value.cpu().numpy()
        pages = slots[:: self._page_size] // self._page_size
        # Slots of a window that were given up are marked by the padding block.
        return pages[pages > 0]

    def _in_order(self) -> Iterator[_Held]:
        raise NotImplementedError

    def _evict(self, chosen: list[_Held], size: int) -> None:
        raise NotImplementedError

    def drop(self, gone: Mask) -> None:
        """Evict every node that holds one of the marked blocks."""
        while True:
            chosen = self._with_descendants([h for h in self._in_order() if gone[h.blocks].any()])
            if not chosen:
                return
            data = self._component
            self._evict(chosen, sum(len(h.node.component_data[data].value) for h in chosen))

    def _with_descendants(self, chosen: list[_Held]) -> list[_Held]:
        return chosen


class _FullTree(_Tree):
    """Keys and values of all tokens: leaves go first, by the tree's own policy."""

    def _in_order(self) -> Iterator[_Held]:
        self._component_object._ensure_eviction_strategy()
        strategy = self._component_object.session_ref_eviction_strategy
        heap = [(strategy(node), node) for node in self._core.evictable_device_leaves]
        heapq.heapify(heap)
        left: dict[int, int] = {}
        while heap:
            _, node = heapq.heappop(heap)
            yield _Held(node, self._blocks(node))
            parent = node.parent
            if parent is self._core.root_node or any(d.lock_ref for d in parent.component_data):
                continue
            if parent.id not in left:
                left[parent.id] = len(parent.children)
            left[parent.id] -= 1
            if left[parent.id] == 0:
                heapq.heappush(heap, (strategy(parent), parent))

    @property
    def _component_object(self) -> Any:
        return self._tree.components[self._component]

    def _with_descendants(self, chosen: list[_Held]) -> list[_Held]:
        """A node goes after all those below it."""
        found: dict[int, Any] = {}
        stack = [held.node for held in chosen]
        while stack:
            node = stack.pop()
            if node.id not in found:
                found[node.id] = node
                stack += node.children.values()
        return [_Held(node, self._blocks(node)) for node in found.values()]

    def _evict(self, chosen: list[_Held], size: int) -> None:
        """Have the tree evict so much by its own policy, but these nodes before all others."""
        component = self._component_object
        strategy, first = component.session_ref_eviction_strategy, {h.node.id for h in chosen}
        component.session_ref_eviction_strategy = lambda node: (
            node.id not in first,
            strategy(node),
        )
        try:
            self._tree.evict(EvictParams(num_tokens=size))
        finally:
            component.session_ref_eviction_strategy = strategy


class _ListedTree(_Tree):
    """Windows and states: any node may give its own up, the least recently used first."""

    def _in_order(self) -> Iterator[_Held]:
        lru = self._core.lru_lists[self._component]
        node = lru.get_lru_no_lock()
        while node is not None and lru.in_list(node):
            yield _Held(node, self._blocks(node))
            node = lru.get_prev_no_lock(node)

    def _evict(self, chosen: list[_Held], size: int) -> None:
        """Make these the least recently used ones, and have the tree evict so much."""
        lru = self._core.lru_lists[self._component]
        for held in reversed(chosen):
            lru._remove_node(held.node)
            lru._add_node_after(lru.tail.lru_prev[lru._pt], held.node)
        window = str(self._component) == _WINDOW
        self._tree.evict(
            EvictParams(swa_num_tokens=size) if window else EvictParams(mamba_num=size)
        )


def cached_by(tree: Any, kind: str, page_size: int) -> Cached:
    """What a scheduler's prefix cache holds of one kind of slots.

    Parameters
    ----------
    tree
        Of a kind that `supported.check_scheduler` has let through.
    kind
        `full`, `swa` or `mamba`.
    page_size
        Slots of a block.
    """
    if tree.disable or "tree_core" not in vars(tree):
        return Cached()
    return (_FullTree if kind == _FULL else _ListedTree)(tree, kind, page_size)
