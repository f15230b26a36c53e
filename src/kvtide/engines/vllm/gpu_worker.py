"""vLLM's CUDA worker: stable capacity beside neighbours, nothing mapped after the warm-up."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from kvtide.device.cuda import CudaDevice
from kvtide.engines.vllm.own_memory import alone_on_device
from kvtide.engines.vllm.worker import ElasticWorker
from kvtide.sizing.capacity import vllm_capacity
from kvtide.units import format_size

__all__ = ["ElasticGPUWorker"]

_log = logging.getLogger("vllm.kvtide")


class ElasticGPUWorker(ElasticWorker, Worker):  # type: ignore[misc]
    """Capacity from the device's total and this process's own costs."""

    def init_device(self) -> None:
        """Initialise as if alone on the device."""
        with alone_on_device():
            super().init_device()

    def determine_available_memory(self) -> int:
        """Profile as vLLM does; the capacity is the stable one, or the explicit one."""
        with alone_on_device():
            available: int = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:
            return available
        capacity_bytes = vllm_capacity(
            self.init_snapshot.total_memory,
            self.cache_config.gpu_memory_utilization,
            weights_bytes=int(self.model_runner.model_memory_usage),
            torch_peak_bytes=int(self.peak_activation_memory),
        )
        # What vLLM sets aside for decoding media in other processes comes out of any size.
        capacity_bytes = self._reserve_mm_ipc_gpu_memory(capacity_bytes)
        _log.info(
            "kvtide: capacity %s, from the device's total (vLLM's own: %s)",
            format_size(capacity_bytes),
            format_size(available),
        )
        return capacity_bytes

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture; what their steps name is mapped meanwhile."""
        if self.kvtide is None:
            return super().compile_or_warm_up_model()
        self.warming = True
        try:
            with alone_on_device():
                return super().compile_or_warm_up_model()
        finally:
            self.warming = False
            torch.cuda.synchronize(self.device)
            self.kvtide.forget_named()

    def use_stream(self) -> None:
        """Order the device's own work (zeroing, fences) with the model's."""
        assert self.kvtide is not None
        device = self.kvtide.memory.device
        assert isinstance(device, CudaDevice)
        device.set_stream(torch.cuda.current_stream(self.device).cuda_stream)
