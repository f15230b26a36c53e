"""A vLLM worker whose KV cache is an arena: reserved whole, mapped where blocks live."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvtide.engines import family
from kvtide.engines.reservation import reserve_for_tests
from kvtide.engines.seats import find_seat
from kvtide.engines.vllm.answered import Answered
from kvtide.engines.vllm.block_major import block_major, prefer
from kvtide.engines.vllm.devices import open_worker_device
from kvtide.engines.vllm.eras import CacheLayout, read_layout
from kvtide.engines.vllm.fitting import check_longest
from kvtide.engines.vllm.own_figures import figures_of
from kvtide.errors import KvtideError
from kvtide.observe.own_figures import publish_figures
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.memory import RankMemory
from kvtide.settings import Settings
from kvtide.units import format_size

__all__ = ["ElasticWorker"]

_log = logging.getLogger("vllm.kvtide")

if TYPE_CHECKING:
    from kvtide.sizing.rows import Allocation

    _Base = Any
else:
    _Base = object


class ElasticWorker(_Base):
    """Mixin before a vLLM worker class."""

    kvtide: Endpoint | None = None
    # The engine warms up: what its steps name is mapped, though no block of it is handed out.
    warming = False
    # What this worker was told that KV and state may take.
    kvtide_budget_bytes: int | None = None
    kvtide_allocated: tuple[Allocation, ...] = ()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Have vLLM make its KV tensors over an arena instead of allocating them."""
        if not kv_cache_config.kv_cache_tensors:
            super().initialize_from_config(kv_cache_config)
            return
        try:
            kv_cache_config, reason = block_major(
                kv_cache_config, self.vllm_config, Settings.from_environ().layout
            )
            memory, layout, name = self._open_memory(kv_cache_config)
            # A number of blocks that somebody gave wins over bytes.
            given = self.cache_config.num_gpu_blocks_override is not None
            budget_bytes = None if given else self.kvtide_budget_bytes
            with Answered(layout, memory, self.device, budget_bytes) as answered:
                super().initialize_from_config(kv_cache_config)
            self.kvtide_allocated = answered.check(kv_cache_config, name)
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

    def _open_memory(self, kv_cache_config: Any) -> tuple[RankMemory, CacheLayout, str]:
        settings = Settings.from_environ()
        device = open_worker_device(self, settings)
        layout = read_layout(kv_cache_config, device.info.granularity_bytes)
        geometry = layout.geometry
        seat = find_seat(settings, device.info)
        check_longest(self.vllm_config, kv_cache_config, geometry, seat)
        reserve_for_tests(seat, device.free_bytes, settings.wait_deadline)
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
        return memory, layout, seat.instance.name

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

    def publish_own_figures(
        self, bytes_by_kind: dict[str, int], planned_bytes: dict[str, int], source: str
    ) -> None:
        """At the end of the start: tell `kvtide census` what this worker found itself to hold."""
        if self.kvtide is not None:
            figures = figures_of(self, bytes_by_kind, planned_bytes, source)
            self._kvtide_figures = publish_figures(figures)

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
