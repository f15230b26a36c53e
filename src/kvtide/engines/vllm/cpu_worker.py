"""vLLM's CPU worker on the host device."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  # must come first of all of vLLM

from kvtide.engines.vllm.own_figures import weights_of
from kvtide.engines.vllm.worker import ElasticWorker

__all__ = ["ElasticCPUWorker"]


class ElasticCPUWorker(ElasticWorker, CPUWorker):  # type: ignore[misc]
    """Capacity by its configuration alone, whatever memory is free on the machine."""

    def determine_available_memory(self) -> int:
        """Warm up as vLLM does; the answer was fixed when the configuration was made."""
        cache = self.cache_config
        capacity_bytes: int = cache.kv_cache_memory_bytes
        # vLLM holds an explicit size against the free memory: under kvtide nothing is taken yet.
        cache.kv_cache_memory_bytes = 1
        try:
            super().determine_available_memory()
        finally:
            cache.kv_cache_memory_bytes = capacity_bytes
        self.kvtide_budget_bytes = capacity_bytes
        return capacity_bytes

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, then tell what was found."""
        result = super().compile_or_warm_up_model()
        weights_bytes = weights_of(self.model_runner)
        self.publish_own_figures({"weights": weights_bytes}, {}, "torch, and the kernel")
        return result
