"""What a GPU process holds beside its KV cache, and what must stay free for it, any engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtide.device.cuda import CudaDevice
from kvtide.errors import LedgerError
from kvtide.ledger import Account
from kvtide.ranks.seat import Seat
from kvtide.units import MIB

__all__ = ["CONTEXT_BYTES", "SOURCE_WORDS", "keep_headroom", "measure_beside"]

# What a torch process holds beyond torch's own reserve, where nobody tells: measured on an H200.
CONTEXT_BYTES = 640 * MIB

SOURCE_WORDS = {"driver": "driver", "torch": "books of torch"}
"""Who says what is held, for a line in the log."""


def measure_beside(device: CudaDevice, mapped_bytes: int, reserved_bytes: int) -> tuple[int, str]:
    """What this process holds beside its KV cache, in bytes, and who says so: driver or torch.

    Parameters
    ----------
    device
        Where it runs.
    mapped_bytes
        Of the KV cache there.
    reserved_bytes
        What torch's own allocator has of it.
    """
    told = device.own_bytes()
    if told is None:
        return reserved_bytes + CONTEXT_BYTES, "torch"
    return max(0, told - mapped_bytes), "driver"


def keep_headroom(
    seat: Seat,
    account: Account,
    headroom_bytes: int,
    reserved: Callable[[], int],
    log: logging.Logger,
) -> None:
    """Have so much of the device left free for an instance's activations.

    What torch's own allocator reserves from now on, as `reserved` tells, is taken out of it.
    """
    began_bytes = reserved()
    account.take_headroom(lambda: min(headroom_bytes, reserved() - began_bytes))
    try:
        # A larger one that was set by hand stands.
        seat.ledger.set_terms(
            seat.instance.name,
            lambda terms: terms._replace(headroom_bytes=max(terms.headroom_bytes, headroom_bytes)),
        )
    except LedgerError as error:
        # The neighbours' promises come first: this instance serves on with less kept free.
        log.warning("kvtide: no headroom for activations is kept: %s", error)
