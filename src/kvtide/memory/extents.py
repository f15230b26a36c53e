"""Spans of an arena, and how runs of them are cut into extents: pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvtide.units import MIB

__all__ = ["MAX_EXTENT_BYTES", "MIN_EXTENT_BYTES", "Span", "ahead_bytes", "cap_for", "cut", "merge"]

MIN_EXTENT_BYTES = 2 * MIB
MAX_EXTENT_BYTES = 512 * MIB
_EXTENTS_OF_A_DEVICE = 64
# Grown ahead of need: this share of what is mapped, within these bounds.
_AHEAD_SHARE = 20
_AHEAD_LEAST_BYTES = 32 * MIB


class Span(NamedTuple):
    """A range of an arena, relative to its first address."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """The offset right behind the range."""
        return self.offset_bytes + self.size_bytes


def merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans, as (offset, size), and join those that touch or overlap."""
    runs: list[tuple[int, int]] = []
    start = end = 0
    for offset, size_bytes in sorted(spans):
        if runs and offset <= end:
            end = max(end, offset + size_bytes)
            runs[-1] = (start, end - start)
        else:
            start, end = offset, offset + size_bytes
            runs.append((offset, size_bytes))
    return runs


def cap_for(total_bytes: int) -> int:
    """The largest extent worth having on a device of so much memory.

    The largest power of two of at most a 64th of it, from 2 to 512 MiB: 4 MiB on 256 MiB.
    """
    share_bytes = max(total_bytes // _EXTENTS_OF_A_DEVICE, MIN_EXTENT_BYTES)
    return min(1 << (share_bytes.bit_length() - 1), MAX_EXTENT_BYTES)


def ahead_bytes(mapped_bytes: int, cap_bytes: int) -> int:
    """What is worth having mapped beyond what is needed, where so much is mapped.

    A twentieth of it, of which the engine's next steps take little, at least 32 MiB or the largest
    extent and at most 512 MiB: of 10,000 blocks of 2 MiB taken one by one fewer than 100 grow.
    """
    share_bytes = min(mapped_bytes // _AHEAD_SHARE, MAX_EXTENT_BYTES)
    return max(share_bytes, min(_AHEAD_LEAST_BYTES, cap_bytes))


def cut(spans: Iterable[Span], cap_bytes: int) -> list[Span]:
    """Cut spans into extents, as few as possible; sorted.

    An extent is a power of two of at least 2 MiB and at most `cap_bytes`, and its offset is a
    multiple of its size. Spans that touch are cut as one run.

    Raises
    ------
    ValueError
        An offset or size is not a multiple of 2 MiB, or the cap is no size of an extent.
    """
    if cap_bytes & (cap_bytes - 1) or not MIN_EXTENT_BYTES <= cap_bytes <= MAX_EXTENT_BYTES:
        raise ValueError(f"no extent can be of {cap_bytes} bytes")
    extents = []
    for offset, size_bytes in merge(spans):
        if offset % MIN_EXTENT_BYTES or size_bytes % MIN_EXTENT_BYTES:
            raise ValueError(
                f"{Span(offset, size_bytes)} is not made of granules of {MIN_EXTENT_BYTES} bytes"
            )
        end = offset + size_bytes
        while offset < end:
            size = min(cap_bytes, 1 << ((end - offset).bit_length() - 1))
            if offset:
                size = min(size, offset & -offset)
            extents.append(Span(offset, size))
            offset += size
    return extents
