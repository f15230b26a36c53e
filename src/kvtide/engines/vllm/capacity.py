"""The stable capacity of a vLLM instance: the same whoever else is on the device."""

from __future__ import annotations

from typing import Any

from kvtide.settings import Settings
from kvtide.sizing.capacity import host_capacity

__all__ = ["fix_capacity"]


def fix_capacity(config: Any, settings: Settings) -> None:
    """On the host device, write the capacity into the configuration: it needs no profile.

    vLLM's own explicit size, `VLLM_CPU_KVCACHE_SPACE` or `--kv-cache-memory-bytes`, is there
    already, and wins.
    """
    from vllm.platforms import current_platform

    cache = config.cache_config
    if current_platform.is_cpu():
        cache.kv_cache_memory_bytes = host_capacity(
            settings.host_memory,
            cache.gpu_memory_utilization,
            explicit_bytes=cache.kv_cache_memory_bytes,
        )
