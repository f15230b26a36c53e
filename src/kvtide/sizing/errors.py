"""What a plan refuses with: a configuration it cannot read, and a cache that does not fit."""

from __future__ import annotations

from kvtide.errors import KvtideError, UsageError

__all__ = ["ConfigError", "DoesNotFitError"]


class ConfigError(UsageError):
    """A model's configuration that cannot be planned; names the file, the field, what is needed."""


class DoesNotFitError(KvtideError):
    """The smallest usable cache is more than the budget.

    Attributes
    ----------
    smallest_budget_bytes
        The least KV budget of a rank with which the same request is a plan; exact.
    longest_max_model_len
        The largest `max_model_len` that fits this budget; exact, 0 where none does.
    num_blocks, max_concurrency
        What this budget holds all the same: engines print these before they refuse.
    """

    def __init__(
        self,
        message: str,
        *,
        smallest_budget_bytes: int,
        longest_max_model_len: int,
        num_blocks: int,
        max_concurrency: float,
    ) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes
        self.longest_max_model_len = longest_max_model_len
        self.num_blocks = num_blocks
        self.max_concurrency = max_concurrency
