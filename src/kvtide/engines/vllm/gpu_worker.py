"""vLLM's CUDA worker: stable capacity beside neighbours, nothing mapped after the warm-up."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from kvtide.device.cuda import CudaDevice
from kvtide.engines import family
from kvtide.engines.own_bytes import CONTEXT_BYTES, measure_beside
from kvtide.engines.reservation import StartCosts
from kvtide.engines.seats import spec_of
from kvtide.engines.vllm.own_figures import Graphs
from kvtide.engines.vllm.own_memory import alone_on_device
from kvtide.engines.vllm.post_capture import describe_own, measure_own, record_headroom
from kvtide.engines.vllm.starting import announce_start
from kvtide.engines.vllm.worker import ElasticWorker
from kvtide.errors import KvtideError
from kvtide.observe.own_figures import by_kind
from kvtide.settings import Settings
from kvtide.sizing.capacity import address_capacity, vllm_capacity
from kvtide.units import format_size

__all__ = ["ElasticGPUWorker"]

_log = logging.getLogger("vllm.kvtide")


class ElasticGPUWorker(ElasticWorker, Worker):  # type: ignore[misc]
    """Capacity from the device's total and this process's own costs."""

    kvtide_start: StartCosts | None = None

    def init_device(self) -> None:
        """Initialise as if alone on the device, and announce what is about to be loaded."""
        with alone_on_device():
            super().init_device()
        try:
            self.kvtide_start = announce_start(self)
        except KvtideError as error:
            family.end_server(error)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; what is loaded is no longer to come."""
        super().load_model(*args, **kwargs)
        if self.kvtide_start is not None:
            self.kvtide_start.loaded()

    def determine_available_memory(self) -> int:
        """Profile as vLLM does; the capacity is the stable one, or the explicit one."""
        with alone_on_device():
            available: int = super().determine_available_memory()
        if self.kvtide_start is not None:
            self.kvtide_start.loaded()
        if self.cache_config.kv_cache_memory_bytes:
            self.kvtide_budget_bytes = available
            return available
        capacity_bytes = vllm_capacity(
            self.init_snapshot.total_memory,
            self.cache_config.gpu_memory_utilization,
            weights_bytes=int(self.model_runner.model_memory_usage),
            torch_peak_bytes=int(self.peak_activation_memory),
        )
        settings = Settings.from_environ()
        if settings.post_capture:
            margin_bytes = spec_of(describe_own(self.device), settings).margin_bytes
            capacity_bytes = address_capacity(
                self.init_snapshot.total_memory,
                margin_bytes,
                weights_bytes=int(self.model_runner.model_memory_usage),
            )
        # What vLLM sets aside for decoding media in other processes comes out of any size.
        capacity_bytes = self._reserve_mm_ipc_gpu_memory(capacity_bytes)
        _log.info(
            "kvtide: capacity %s, from the device's total (vLLM's own: %s)",
            format_size(capacity_bytes),
            format_size(available),
        )
        self.kvtide_budget_bytes = capacity_bytes
        return capacity_bytes

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture; what their steps name is mapped meanwhile."""
        if self.kvtide is None:
            result = super().compile_or_warm_up_model()
            # Without a KV cache too what was announced and not taken is others' from here on.
            device = CudaDevice(self.device.index or 0)
            reserved_bytes = int(torch.accelerator.memory_reserved(self.device))
            self._end_start(*measure_beside(device, 0, reserved_bytes))
            return result
        self.warming = True
        graphs = Graphs(self.model_runner)
        try:
            with alone_on_device():
                result = super().compile_or_warm_up_model()
        finally:
            self.warming = False
            torch.cuda.synchronize(self.device)
            self.kvtide.forget_named()
        self._tell_of_own(graphs.captured_bytes)
        own_bytes, source = measure_own(self)
        self._end_start(own_bytes, source)
        if Settings.from_environ().post_capture:
            record_headroom(self, own_bytes, source)
        return result

    def _end_start(self, own_bytes: int, source: str) -> None:
        if self.kvtide_start is not None:
            self.kvtide_start.finish(own_bytes, source)
            self.kvtide_start = None

    def _tell_of_own(self, graphs_bytes: int) -> None:
        """What torch and the driver say of this process, by kind."""
        weights_bytes = int(self.model_runner.model_memory_usage)
        # Only a start that profiled has it: an explicit size of the cache needs no profile.
        peak_bytes = int(vars(self).get("peak_activation_memory", 0))
        assert self.kvtide is not None
        device = self.kvtide.memory.device
        assert isinstance(device, CudaDevice)
        found = by_kind(
            reserved_bytes=int(torch.accelerator.memory_reserved(self.device)),
            weights_bytes=weights_bytes,
            graphs_bytes=graphs_bytes,
            peak_bytes=peak_bytes,
            process_bytes=device.own_bytes(),
            mapped_bytes=self.kvtide.memory.arena.mapped_bytes,
            context_bytes=CONTEXT_BYTES,
        )
        planned = {"weights": weights_bytes, "activations": peak_bytes}
        self.publish_own_figures(found.bytes_by_kind, planned, found.source)

    def use_stream(self) -> None:
        """Order the device's own work (zeroing, fences) with the model's."""
        assert self.kvtide is not None
        device = self.kvtide.memory.device
        assert isinstance(device, CudaDevice)
        device.set_stream(torch.cuda.current_stream(self.device).cuda_stream)
