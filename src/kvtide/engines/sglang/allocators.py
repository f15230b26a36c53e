"""SGLang's allocators with only backed slots in their free lists; alloc and free stay native."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

__all__ = ["Conserving", "FreeSlots", "adopt"]

Mask = npt.NDArray[np.bool_]


class Conserving:
    """While this is on, allocators count slots without memory as free, as SGLang's checks do."""

    def __enter__(self) -> None:
        for kind in _KINDS:
            kind.available_size = kind.conserved_size

    def __exit__(self, *_: object) -> None:
        for kind in _KINDS:
            kind.available_size = kind.present_size


def _elastic(native: Any) -> Any:
    """The elastic kind of an allocator class. Its instances can become ones of this in place."""

    native_size: Callable[[Any], int] = native.available_size

    class Elastic(native):  # type: ignore[misc]
        """Its free list holds only blocks that are backed. A block is a page, or a state's slot.

        Attributes
        ----------
        hidden
            Blocks that are not in circulation, since they have no memory.
        """

        hidden = 0

        @property
        def block_slots(self) -> int:
            """Slots of a block."""
            return 1 if native is MambaSlotAllocator else int(self.page_size)

        def native_size(self) -> int:
            """Slots in the free list."""
            return native_size(self)

        def conserved_size(self) -> int:
            """What could be had with all memory there."""
            return native_size(self) + self.hidden * self.block_slots

        # Native's own function: it is called for every batch, several times.
        present_size = available_size = native.available_size

        def clear(self) -> None:
            """Everything is free: all that is backed."""
            super().clear()
            self.kvtide_free.keep(self.kvtide_usable())

    Elastic.__name__ = Elastic.__qualname__ = f"Elastic{native.__name__}"
    return Elastic


def _shared(elastic: Any) -> Any:
    """The kind of an elastic allocator that several ranks have alike."""

    class Shared(elastic):  # type: ignore[misc]
        """
        Attributes
        ----------
        withheld
            Free blocks that this rank has and another one does not: nobody may count with them.
        """

        withheld = 0

        def present_size(self) -> int:
            """What can be had now, in all ranks."""
            found: int = self.native_size() - self.withheld * self.block_slots
            return found

        available_size = present_size

    Shared.__name__ = Shared.__qualname__ = f"Shared{elastic.__name__}"
    return Shared


_ELASTIC = {
    native: _elastic(native)
    for native in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, MambaSlotAllocator)
}
_SHARED = {native: _shared(elastic) for native, elastic in _ELASTIC.items()}
_KINDS: list[Any] = [*_ELASTIC.values(), *_SHARED.values()]


class _Usable(Protocol):
    def __call__(self) -> Mask: ...


class FreeSlots:
    """The free list of an allocator, as elastic memory sees it: pages or slots by number."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._field = "free_slots" if isinstance(allocator, MambaSlotAllocator) else "free_pages"
        self._device = allocator.device

    @property
    def count(self) -> int:
        """How many blocks are free."""
        if self._field == "free_slots":
            return len(self._allocator.free_slots)
        native: int = self._allocator.native_size()
        return native // int(self._allocator.block_slots)

    def _list(self) -> torch.Tensor:
        if self._field == "free_pages":
            self._allocator.merge_and_sort_free()
        found: torch.Tensor = vars(self._allocator)[self._field]
        return found

    def _set(self, blocks: torch.Tensor) -> None:
        setattr(self._allocator, self._field, blocks)

    def give_span(self, blocks: Sequence[Any], low: int, high: int) -> None:
        """Let the engine have blocks [low, high)."""
        span = torch.arange(low, high, dtype=torch.int64, device=self._device)
        self._set(torch.cat((self._list(), span)))

    def withdraw(self, gone: Mask) -> None:
        """Drop every free block that is marked in `gone`; the lowest of the others come first."""
        self.keep(~gone)

    def keep(self, kept: Mask) -> None:
        """Drop every free block but those marked; the lowest come first."""
        free = self._list()
        marked = torch.from_numpy(kept).to(self._device)
        self._set(torch.sort(free[marked[free]])[0])

    def mask(self, blocks_total: int) -> Mask:
        """Which blocks are free, by number."""
        free = np.zeros(blocks_total, np.bool_)
        free[self._list().cpu().numpy()] = True
        return free


def adopt(allocator: Any, usable: _Usable, *, shared: bool = False) -> FreeSlots:
    """Make an allocator elastic, to whom others refer already; nothing is free afterwards.

    Parameters
    ----------
    allocator
        Of tokens, pages or states.
    usable
        Answers which blocks are backed, by number, shape (blocks_total,).
    shared
        Whether other ranks have the same allocator, and not always the same memory.
    """
    allocator.__class__ = (_SHARED if shared else _ELASTIC)[type(allocator)]
    free = FreeSlots(allocator)
    allocator.kvtide_free = free
    allocator.kvtide_usable = usable
    free._set(free._list()[:0])
    return free
