"""The stable capacity of an SGLang rank: the same whoever else is on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtide.settings import Settings
from kvtide.sizing.capacity import host_capacity, sglang_capacity
from kvtide.units import GIB

__all__ = ["available_bytes", "config_of_budget"]


def available_bytes(
    profile: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any
) -> int:
    """What SGLang may plan its pools for, in place of its profile of free memory."""
    from sglang.srt.runtime_context import get_schedule

    fraction = float(get_schedule().mem_fraction_static)
    if str(configurator.device) == "cpu":
        size_bytes = host_capacity(Settings.from_environ().host_memory, fraction)
    else:
        import torch

        total_bytes = torch.cuda.get_device_properties(configurator.gpu_id).total_memory
        size_bytes = sglang_capacity(int(total_bytes), fraction)
    if configurator.mambaish_config is None:
        return size_bytes
    # SGLang takes the states out of it, in GiB.
    return int(configurator._handle_max_mamba_cache(size_bytes / GIB) * GIB)


def config_of_budget(
    resolve: Callable[..., Any], configurator: Any, budget_bytes: int, **kwargs: Any
) -> Any:
    """A pool configuration for a budget; an explicit number of tokens wins, also a larger one."""
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import get_schedule

    config = resolve(configurator, budget_bytes, **kwargs)
    explicit, page_size = get_schedule().max_total_tokens, get_schedule().page_size
    if explicit is None or explicit // page_size * page_size <= config.max_total_num_tokens:
        return config
    sizes = create_memory_pool_configurator(configurator)
    return sizes.calculate_pool_sizes_from_max_tokens(explicit, page_size)
