"""After graphs are captured: what a rank holds beside its pools, and must still get, on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from kvtide.device.cuda import CudaDevice
from kvtide.engines.own_bytes import SOURCE_WORDS, keep_headroom, measure_beside
from kvtide.engines.sglang.parts import Part
from kvtide.settings import Settings
from kvtide.units import format_size

__all__ = ["headroom_after_capture", "record_own"]

_log = logging.getLogger("sglang.kvtide")


def headroom_after_capture(
    total_bytes: int, fraction: float, *, own_bytes: int, weights_bytes: int
) -> int:
    """What must stay free for activations, in bytes.

    SGLang leaves all but `fraction` of a device to its context, its graphs and its activations;
    what of that is held once graphs are captured is held already.
    """
    aside_bytes = total_bytes - int(total_bytes * fraction)
    return max(0, aside_bytes - max(0, own_bytes - weights_bytes))


def record_own(scheduler: Any, parts: Iterable[Part]) -> None:
    """Enter in the ledger what a warm rank holds beside its pools, and its headroom.

    The ledger's budget leaves out by itself what anybody holds beside the pools: it is measured
    anew here, since graphs were captured after the pools were made. On the host nothing counts
    beside them.
    """
    parts = list(parts)
    device, seat, account = parts[0].device, parts[0].seat, parts[0].memory.account
    if device.info.backend == "host":
        return
    from sglang.srt.runtime_context import get_schedule

    assert isinstance(device, CudaDevice)
    mapped_bytes = sum(part.memory.arena.mapped_bytes for part in parts)
    reserved_bytes = int(torch.cuda.memory_reserved())
    own_bytes, source = measure_beside(device, mapped_bytes, reserved_bytes)
    seat.instance.measured(own_bytes, source)
    if Settings.from_environ().post_capture:
        headroom_bytes = headroom_after_capture(
            device.info.total_bytes,
            float(get_schedule().mem_fraction_static),
            own_bytes=own_bytes,
            weights_bytes=_weights_of(scheduler.tp_worker.model_runner.model),
        )
        keep_headroom(
            seat, account, headroom_bytes, lambda: int(torch.cuda.memory_reserved()), _log
        )
        _log.info(
            "kvtide: %s held beside the KV cache (by the %s), %s headroom",
            format_size(own_bytes),
            SOURCE_WORDS[source],
            format_size(headroom_bytes),
        )
    account.sample()


def _weights_of(model: Any) -> int:
    """Bytes of a model's parameters and buffers, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())
