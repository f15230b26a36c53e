"""The stable capacity of an instance: from the device's total, never from what is free on it.

Nothing here depends on neighbours, so the order in which engines start changes nothing, and the
sum over the engines of a device may exceed it. An explicit size always wins.
"""

from __future__ import annotations

import math
from fractions import Fraction

from kvtide.errors import UsageError

__all__ = [
    "activation_headroom",
    "address_capacity",
    "fraction_of",
    "host_capacity",
    "sglang_capacity",
    "vllm_capacity",
]


def fraction_of(total_bytes: int, fraction: float) -> int:
    """`floor(fraction * total)`, exact for the decimal that was written (0.9 is nine tenths).

    Raises
    ------
    UsageError
        The fraction is not above 0 and at most 1.
    """
    if not 0.0 < fraction <= 1.0:
        raise UsageError(f"a fraction of {fraction!r} of a device: it must be above 0, at most 1")
    return math.floor(Fraction(repr(float(fraction))) * total_bytes)


def vllm_capacity(
    total_bytes: int,
    utilization: float,
    *,
    weights_bytes: int,
    torch_peak_bytes: int,
    explicit_bytes: int | None = None,
) -> int:
    """KV bytes of a vLLM rank on a GPU.

    Parameters
    ----------
    total_bytes
        The device's total memory.
    utilization
        vLLM's `gpu_memory_utilization`.
    weights_bytes, torch_peak_bytes
        This process's own costs: the loaded weights, and torch's peak of the profile run above
        them (activations). Both are process-local figures.
    explicit_bytes
        vLLM's `kv_cache_memory_bytes`, if it was given.

    Returns
    -------
    int
        Bytes, 0 where the costs leave nothing.
    """
    if explicit_bytes is not None:
        return explicit_bytes
    return max(0, fraction_of(total_bytes, utilization) - weights_bytes - torch_peak_bytes)


def address_capacity(total_bytes: int, margin_bytes: int, *, weights_bytes: int) -> int:
    """KV bytes that a rank on a GPU may ever hold, if it is sized once its graphs are captured.

    An upper bound for the addresses to reserve, from process-local figures alone; what may really
    be mapped is total - margin - the instance's own measured bytes - headroom, by the ledger.
    """
    return max(0, total_bytes - margin_bytes - weights_bytes)


def activation_headroom(
    peak_bytes: int, *, reserved_bytes: int, allocated_bytes: int, whole: bool
) -> int:
    """What an instance must be able to take beside its KV cache that it does not hold now.

    Parameters
    ----------
    peak_bytes
        Activations of the largest step that was profiled: prefill, and logits of all its tokens.
    reserved_bytes, allocated_bytes
        torch's books after capture; what is reserved and not allocated serves activations too.
    whole
        Steps may run outside of the graphs' own memory: nothing that is resident counts.
    """
    if whole:
        return peak_bytes
    return max(0, peak_bytes - max(0, reserved_bytes - allocated_bytes))


def sglang_capacity(
    total_bytes: int, mem_fraction_static: float, *, explicit_bytes: int | None = None
) -> int:
    """KV bytes of an SGLang rank on a GPU: the static fraction of the device's total."""
    if explicit_bytes is not None:
        return explicit_bytes
    return fraction_of(total_bytes, mem_fraction_static)


def host_capacity(
    host_memory_bytes: int, fraction: float, *, explicit_bytes: int | None = None
) -> int:
    """KV bytes of a rank on the host device: nothing is subtracted, weights do not count there.

    Parameters
    ----------
    host_memory_bytes
        `KVTIDE_HOST_MEMORY`.
    fraction
        The engine's own flag, as on a GPU.
    explicit_bytes
        `VLLM_CPU_KVCACHE_SPACE` in bytes, or another explicit size, if it was given.
    """
    if explicit_bytes is not None:
        return explicit_bytes
    return fraction_of(host_memory_bytes, fraction)
