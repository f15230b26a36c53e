"""The tide of this process: a scheduler's process has one scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.engines.sglang.tide import Tide

__all__ = ["set_tide", "tide"]

_tide: Tide | None = None


def tide() -> Tide | None:
    """The tide, once the scheduler is made."""
    return _tide


def set_tide(made: Tide) -> None:
    """Note the tide of the scheduler that was just made."""
    global _tide
    _tide = made
