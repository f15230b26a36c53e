"""A vLLM worker whose KV cache is an arena: reserved whole, mapped where blocks live."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from kvtide.engines import family
from kvtide.engines.seats import find_seat
from kvtide.engines.vllm.block_major import block_major, prefer
from kvtide.engines.vllm.devices import open_worker_device
from kvtide.engines.vllm.eras import CacheLayout, read_layout
from kvtide.engines.vllm.fitting import check_longest
from kvtide.errors import KvtideError, UnsupportedError
from kvtide.memory.tensors import tensor_over
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.memory import RankMemory
from kvtide.settings import Settings
from kvtide.units import format_size

__all__ = ["ElasticWorker"]

_log = logging.getLogger("vllm.kvtide")

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class ElasticWorker(_Base):
    """Mixin before a vLLM worker class."""

    kvtide: Endpoint | None = None
    # The engine warms up: what its steps name is mapped, though no block of it is handed out.
    warming = False

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Have vLLM make its KV tensors over an arena instead of allocating them."""
        if not kv_cache_config.kv_cache_tensors:
            super().initialize_from_config(kv_cache_config)
            return
        try:
            kv_cache_config, reason = block_major(
                kv_cache_config, self.vllm_config, Settings.from_environ().layout
            )
            memory, layout = self._open_memory(kv_cache_config)
            with _Answered(layout, memory, self.device) as answered:
                super().initialize_from_config(kv_cache_config)
            answered.check()
        except KvtideError as error:
            family.end_server(error)
        _log.info(
            "kvtide: %s reserved for %d blocks, %s (%s), %s mapped",
            format_size(layout.geometry.arena_bytes),
            layout.geometry.blocks_total,
            layout.kind,
            reason,
            format_size(memory.arena.mapped_bytes),
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """From 0.29 on: block-outermost layouts first, unless `KVTIDE_LAYOUT` says otherwise."""
        return prefer(super().get_supported_kv_cache_layouts(), Settings.from_environ().layout)

    def _open_memory(self, kv_cache_config: Any) -> tuple[RankMemory, CacheLayout]:
        settings = Settings.from_environ()
        device = open_worker_device(self, settings)
        layout = read_layout(kv_cache_config, device.info.granularity_bytes)
        geometry = layout.geometry
        seat = find_seat(settings, device.info)
        check_longest(self.vllm_config, kv_cache_config, geometry, seat)
        account = seat.ledger.enroll(
            seat.instance,
            pool_name="kv",
            rank=self.rank,
            blocks_total=geometry.blocks_total,
            block_bytes=geometry.block_bytes,
            sampler=device.free_bytes,
        )
        memory = RankMemory(device, geometry.arena_bytes, account)
        self.kvtide = Endpoint(
            memory, seat, geometry, layout.kind, self.rank, settings.wait_deadline
        )
        self.use_stream()
        self.kvtide.back_null_block()
        return memory, layout

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry out what the step says of memory, then run it."""
        if self.kvtide is not None:
            self.use_stream()
            try:
                if self.warming:
                    self.kvtide.back_named(_named_blocks(scheduler_output))
                self.kvtide.step(
                    scheduler_output.__dict__.get("kvtide"),
                    runs=scheduler_output.total_num_scheduled_tokens > 0,
                )
            except KvtideError as error:
                family.end_server(error)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def use_stream(self) -> None:
        """Order the device's own work with the model's; nothing to do on the host."""

    def kvtide_describe(self) -> bytes | None:
        """What the scheduler must know of this worker's memory; None without a KV cache."""
        return None if self.kvtide is None else self.kvtide.describe()

    def shutdown(self) -> None:
        """Give everything back, then shut down."""
        super().shutdown()
        if self.kvtide is not None:
            self.kvtide.close()
            self.kvtide = None


def _named_blocks(scheduler_output: Any) -> set[int]:
    """The blocks that a step of the warm-up names."""
    named = {
        block
        for request in scheduler_output.scheduled_new_reqs
        for group in request.block_ids
        for block in group
    }
    for groups in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for group in groups or ():
            named.update(group)
    return named


class _Answered(TorchFunctionMode):
    """Answers exactly the calls by which vLLM allocates its KV cache."""

    def __init__(self, layout: CacheLayout, memory: RankMemory, device: torch.device) -> None:
        super().__init__()
        self._layout = layout
        self._memory = memory
        self._device = device
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        allocations = self._layout.allocations
        if (
            func is torch.zeros
            and self._calls < len(allocations)
            and args
            and args[0] == allocations[self._calls][0]
            and kwargs.get("dtype") is torch.int8
        ):
            size_bytes, offset_bytes = allocations[self._calls]
            self._calls += 1
            arena = self._memory.arena
            return tensor_over(
                arena.address + offset_bytes,
                size_bytes,
                arena.device.info,
                self._device.index or 0,
            )
        return func(*args, **kwargs)

    def check(self) -> None:
        """Whether all of the KV cache lies in the arena.

        Raises
        ------
        UnsupportedError
            vLLM allocated some of it otherwise.
        """
        expected = len(self._layout.allocations)
        if self._calls != expected:
            import vllm

            raise UnsupportedError(
                f"vLLM {vllm.__version__} asked for {self._calls} of the {expected} KV-cache "
                "allocations that its configuration lists: it allocates in a way that kvtide does "
                "not know; supported are 0.26 on a GPU and 0.28 to 0.32 on a CPU"
            )
