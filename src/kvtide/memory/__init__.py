"""Arenas and extents: address space that physical memory comes and goes in."""

from kvtide.memory.arena import Arena
from kvtide.memory.backing import Meter, Quarantined
from kvtide.memory.extents import Span, cap_for, cut

__all__ = ["Arena", "Meter", "Quarantined", "Span", "cap_for", "cut"]
