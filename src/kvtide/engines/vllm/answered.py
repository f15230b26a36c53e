"""vLLM's calls that allocate its KV cache: answered with an arena, and held against the budget."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from torch.overrides import TorchFunctionMode

from kvtide.engines.vllm.allocated import list_allocated
from kvtide.engines.vllm.eras import CacheLayout
from kvtide.errors import NeverFitsError, UnsupportedError
from kvtide.memory.tensors import tensor_over
from kvtide.ranks.memory import RankMemory
from kvtide.sizing import gate
from kvtide.sizing.rows import Allocation
from kvtide.units import format_size

__all__ = ["Answered"]


class Answered(TorchFunctionMode):
    """Answers exactly the calls by which vLLM allocates its KV cache, and counts what they ask for.

    Parameters
    ----------
    layout
        What the configuration says that there will be.
    memory, device
        Where it shall lie.
    budget_bytes
        What the calls may ask for together; None where the engine was told nothing.
    """

    def __init__(
        self,
        layout: CacheLayout,
        memory: RankMemory,
        device: torch.device,
        budget_bytes: int | None,
    ) -> None:
        super().__init__()
        self._layout = layout
        self._memory = memory
        self._device = device
        self._budget_bytes = budget_bytes
        self._listed: list[int] = []
        self._unlisted: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8 or not args:
            return func(*args, **kwargs)
        allocations, place = self._layout.allocations, len(self._listed)
        if place < len(allocations) and args[0] == allocations[place][0]:
            size_bytes, offset_bytes = allocations[place]
            self._listed.append(size_bytes)
            arena = self._memory.arena
            return tensor_over(
                arena.address + offset_bytes,
                size_bytes,
                arena.device.info,
                self._device.index or 0,
            )
        size_bytes = torch.Size(args[0] if isinstance(args[0], (tuple, list)) else args).numel()
        self._unlisted.append(size_bytes)
        asked_bytes = sum(self._listed) + sum(self._unlisted)
        if self._budget_bytes is not None and asked_bytes > self._budget_bytes:
            # This one would take memory at once: it is not let through.
            raise NeverFitsError(
                f"vLLM {vllm.__version__} asks for {format_size(size_bytes)} that its KV-cache "
                f"configuration does not list, {format_size(asked_bytes)} of "
                f"{format_size(self._budget_bytes)} in all: refused"
            )
        return func(*args, **kwargs)

    def check(self, config: Any, who: str) -> tuple[Allocation, ...]:
        """What was allocated, by the layers that lie in it.

        Raises
        ------
        NeverFitsError
            Together it is more than the budget; has the table of allocations.
        UnsupportedError
            vLLM allocated some of the KV cache otherwise than in the arena.
        """
        allocated = list_allocated(config, self._listed, self._unlisted)
        if self._budget_bytes is not None:
            verdict = gate.check(allocated, self._budget_bytes, who=who)
            if not verdict.fits:
                raise NeverFitsError(verdict.message)
        expected = len(self._layout.allocations)
        if len(self._listed) != expected:
            raise UnsupportedError(
                f"vLLM {vllm.__version__} asked for {len(self._listed)} of the {expected} KV-cache "
                "allocations that its configuration lists: it allocates in a way that kvtide does "
                "not know; supported are 0.26 on a GPU and 0.28 to 0.32 on a CPU"
            )
        return allocated
