"""After graphs are captured: what this instance holds beside its KV cache, and must still get."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvtide.device.base import DeviceInfo
from kvtide.device.cuda import CudaDevice
from kvtide.engines.own_bytes import SOURCE_WORDS, keep_headroom, measure_beside
from kvtide.sizing.capacity import activation_headroom
from kvtide.units import format_size

__all__ = ["describe_own", "eager_reason", "measure_own", "record_headroom"]

_log = logging.getLogger("vllm.kvtide")


def describe_own(device: torch.device) -> DeviceInfo:
    """A worker's device as its ledger describes it."""
    return CudaDevice(device.index or 0).info


def eager_reason(vllm_config: Any, groups: Any) -> str | None:
    """Why steps may run outside of the graphs' own memory, with the flag to set; or None.

    Parameters
    ----------
    vllm_config
        Of the engine.
    groups
        Its KV-cache groups.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    compilation = vllm_config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or []
    most = vllm_config.scheduler_config.max_num_seqs
    speculative = vllm_config.speculative_config
    if speculative is not None:
        most *= 1 + speculative.num_speculative_tokens
    if vllm_config.model_config.enforce_eager or not sizes:
        return "no graphs are captured: leave out --enforce-eager"
    if max(sizes) < most:
        return (
            f"decode batches of up to {most} tokens run eagerly above the largest captured one, "
            f"{max(sizes)}: raise --max-cudagraph-capture-size or lower --max-num-seqs"
        )
    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups):
        return "the model keeps recurrent state, whose prefill runs eagerly"
    return None


def measure_own(worker: Any) -> tuple[int, str]:
    """What a warm worker holds beside its KV cache, in bytes, and who says so: driver or torch."""
    memory = worker.kvtide.memory
    reserved_bytes = int(torch.accelerator.memory_reserved(worker.device))
    return measure_beside(memory.device, memory.arena.mapped_bytes, reserved_bytes)


def record_headroom(worker: Any, own_bytes: int, source: str) -> None:
    """Enter an instance's headroom in the ledger; log each term of what it may hold.

    The budget leaves out by itself what an instance holds beside its pools, since it is sampled;
    the headroom is what it does not hold now and must find free when a step needs it.
    """
    endpoint = worker.kvtide
    device, account = endpoint.memory.device, endpoint.memory.account

    def reserved() -> int:
        return int(torch.accelerator.memory_reserved(worker.device))

    allocated_bytes = int(torch.accelerator.memory_allocated(worker.device))
    reason = eager_reason(worker.vllm_config, worker.model_runner.kv_cache_config.kv_cache_groups)
    peak_bytes = int(vars(worker).get("peak_activation_memory", 0))
    headroom_bytes = activation_headroom(
        peak_bytes,
        reserved_bytes=reserved(),
        allocated_bytes=allocated_bytes,
        whole=reason is not None,
    )
    if reason is not None:
        _log.warning(
            "kvtide: %s stay free for activations, since %s", format_size(headroom_bytes), reason
        )
    seat = endpoint.seat
    keep_headroom(seat, account, headroom_bytes, reserved, _log)
    account.sample()
    total_bytes = device.info.total_bytes
    margin_bytes = seat.ledger.spec.margin_bytes
    _log.info(
        "kvtide: may hold %s of KV cache when alone: %s of the device - %s margin - %s of its own "
        "(by the %s) - %s headroom",
        format_size(total_bytes - margin_bytes - own_bytes - headroom_bytes),
        format_size(total_bytes),
        format_size(margin_bytes),
        format_size(own_bytes),
        SOURCE_WORDS[source],
        format_size(headroom_bytes),
    )
