"""What SGLang's versions name differently of a request, one adapter an era."""

from __future__ import annotations

import functools
from typing import Any, Protocol

__all__ = ["Era", "era_of"]


class Era(Protocol):
    """How a request's place in the prefix cache and in its prompt are kept."""

    def prefix_length(self, request: Any) -> int:
        """Tokens of it that have their slots already."""

    def extent(self, request: Any) -> Any:
        """What of its prompt was last chosen to be taken up."""

    def set_extent(self, request: Any, extent: Any) -> None:
        """Choose this of its prompt instead."""

    def unlock(self, tree: Any, request: Any) -> None:
        """Let go of the prefix that was locked for it."""


class _Receipts:
    """Up to 0.5.22: slots of the prefix are kept with the request, and a receipt of its lock."""

    def prefix_length(self, request: Any) -> int:
        return len(request.prefix_indices)

    def extent(self, request: Any) -> Any:
        return request.extend_range

    def set_extent(self, request: Any, extent: Any) -> None:
        request.extend_range = extent

    def unlock(self, tree: Any, request: Any) -> None:
        tree.dec_lock_ref(request.last_node, request.lock_receipt)


class _Locks:
    """From 0.5.23: a prefix is a length, and a lock is a thing of its own."""

    def prefix_length(self, request: Any) -> int:
        return int(request.prefix_len)

    def extent(self, request: Any) -> Any:
        return request.extend_end

    def set_extent(self, request: Any, extent: Any) -> None:
        request.extend_end = extent

    def unlock(self, tree: Any, request: Any) -> None:
        tree.unlock(request.lock)
        request.lock = None


def era_of(tree: Any) -> Era:
    """The era of the SGLang whose prefix cache this is; asked for every prompt, chosen once."""
    kind: Any = type(tree)
    return _era_of_kind(kind)


@functools.cache
def _era_of_kind(kind: Any) -> Era:
    return _Locks() if "unlock" in dir(kind) else _Receipts()
