"""Splitting an extent where no memory can be had: its contents are carried by free granules."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvtide.errors import DeviceError
from kvtide.memory.arena import Arena
from kvtide.memory.extents import Span
from kvtide.units import format_size

__all__ = ["split_by_way_of"]

_log = logging.getLogger(__name__)

_TRIES = 100
_PAUSE_SECONDS = 0.02


def split_by_way_of(arena: Arena, span: Span, keep: Sequence[Span], staging: Sequence[int]) -> bool:
    """Exchange an extent for handles of just some of its parts, contents and places kept.

    The extent is released before its parts are created, so nothing is held twice. Whoever goes by
    the ledger cannot take the memory in between: it stays charged here. If somebody else does, it
    is waited for, two seconds at most: what was in the extent has no other place any more.

    Parameters
    ----------
    arena
        Of the extent.
    span
        One whole extent, which nothing reads or writes meanwhile.
    keep
        Parts of it of whole granules, one handle each.
    staging
        Offsets of mapped granules elsewhere in the arena that hold nothing, as many as are kept.

    Returns
    -------
    bool
        False when the contents could not be copied, or the extent not be released: nothing has
        changed then.

    Raises
    ------
    DeviceError
        The parts could not be mapped again, and what was in them is lost.
    """
    device, base = arena.device, arena.address
    size = device.info.granularity_bytes
    kept = [at for part in keep for at in range(part.offset_bytes, part.end_bytes, size)]
    assert len(kept) == len(staging)
    assert not any(span.offset_bytes <= at < span.end_bytes for at in staging)
    try:
        for at, stage in zip(kept, staging, strict=True):
            device.copy(base + stage, base + at, size)
        device.fence().wait()
    except DeviceError:
        return False
    if not arena.lift(span):
        return False
    if not _regrow(arena, keep):
        raise DeviceError(
            f"{format_size(len(kept) * size)} of KV cache in use had to be moved, and the device "
            "has no memory for them any more: another process took it; see `kvtide doctor` for "
            "who is on the device"
        )
    for at, stage in zip(kept, staging, strict=True):
        device.copy(base + at, base + stage, size)
    device.fence().wait()
    return True


def _regrow(arena: Arena, keep: Sequence[Span]) -> bool:
    for _ in range(_TRIES):
        try:
            if arena.grow(keep):
                return True
        except DeviceError as error:
            _log.warning("what an extent keeps is not mapped yet: %s", error)
        time.sleep(_PAUSE_SECONDS)
    return False
