"""What the ranks of one server agree on: each says a number, all go by the smallest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Agreement"]


class Agreement:
    """Ranks that schedule the same batches, each in a process of its own.

    Parameters
    ----------
    group
        SGLang's own CPU group of theirs.

    Attributes
    ----------
    rank, size
        This rank among them, and how many they are.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = int(torch.distributed.get_rank(group))
        self.size = int(torch.distributed.get_world_size(group))

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest that any rank says, of each number. All ranks call it, or none."""
        if self.size == 1:
            return list(numbers)
        said = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [int(number) for number in said.tolist()]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest that any rank says, of each number. All ranks call it, or none."""
        return [-number for number in self.smallest([-number for number in numbers])]

    def gather(self, told: Any) -> list[Any]:
        """What every rank tells, by rank."""
        if self.size == 1:
            return [told]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, told, group=self._group)
        return found
