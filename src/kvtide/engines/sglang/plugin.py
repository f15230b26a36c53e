"""Activation: SGLang's own hook registry puts our functions around its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from kvtide.engines import family
from kvtide.errors import KvtideError
from kvtide.observe import logs
from kvtide.settings import Settings

__all__ = ["activate"]

_active = False


def activate() -> None:
    """Put this process of SGLang under kvtide; once. Ends the server on a clear error."""
    global _active
    if _active:
        return
    _active = True
    try:
        logs.set_up(Settings.from_environ().log)
        family.join()
    except KvtideError as error:
        family.end_server(error)
    # From 0.5.23 on SGLang prefers the one in Rust, which does not tell what lies where.
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    _hook_server()
    _hook_pools()
    _hook_scheduler()


def _around(target: str, hook: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)


def _hook_server() -> None:
    def launch(original: Any, cls: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _register(server_args)
        except KvtideError as error:
            family.end_server(error)
        return original(cls, server_args, *args, **kwargs)

    def kill(original: Any, *args: Any, **kwargs: Any) -> Any:
        # SGLang ends its own processes by force when it closes: no death is unexpected then.
        family.closing()
        return original(*args, **kwargs)

    _around("entrypoints.engine.Engine._launch_scheduler_processes", launch)
    _around("utils.common.kill_process_tree", kill)


def _register(server_args: Any) -> None:
    """Refuse what is not supported, and register the server: only its outermost process does."""
    from kvtide.engines.seats import take_seats
    from kvtide.engines.sglang import supported
    from kvtide.engines.sglang.devices import devices_of

    arguments = server_args.resolved_dict()
    supported.check(arguments)
    if family.join():
        settings = Settings.from_environ()
        name = supported.default_name(arguments)
        take_seats(settings, name, devices_of(arguments, settings))


def _hook_pools() -> None:
    from kvtide.engines.sglang import capacity

    def create(original: Any, pool: Any) -> None:
        from kvtide.engines.sglang.parts import create_kv

        create_kv(functools.partial(original, pool), pool)

    def create_states(original: Any, pool: Any, **arguments: Any) -> None:
        from kvtide.engines.sglang.parts import create_states

        create_states(functools.partial(original, pool, **arguments), pool, arguments)

    pools = "mem_cache.memory_pool"
    _around(f"{pools}.MHATokenToKVPool._create_buffers_normal", create)
    _around(f"{pools}.MLATokenToKVPool._create_buffers", create)
    _around(f"{pools}.MambaPool.__init__", create_states)
    configurator = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
    _around(f"{configurator}._profile_available_bytes", capacity.available_bytes)
    _around(f"{configurator}.config_from_budget", capacity.config_of_budget)


def _hook_scheduler() -> None:
    from kvtide.engines.sglang import rounds

    scheduler = "managers.scheduler.Scheduler"
    _around(f"{scheduler}.__init__", rounds.make_scheduler)
    _around(f"{scheduler}.get_next_batch_to_run", rounds.next_batch)
    _around(f"{scheduler}.on_idle", rounds.on_idle)
    _around(f"{scheduler}.flush_cache", rounds.flush_cache)
    _around(f"{scheduler}.get_num_allocatable_reqs", rounds.allocatable)
    _around(f"{scheduler}._get_new_batch_prefill_raw", rounds.choose_prompts)
    batch = "managers.schedule_batch.ScheduleBatch"
    _around(f"{batch}.check_decode_mem", rounds.decode_fits)
    _around(f"{batch}.retract_decode", rounds.retract)
    _around("mem_cache.allocation.alloc_for_extend", rounds.allocate_prompts)
    observer = "managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver"
    _around(f"{observer}.get_pool_stats", rounds.pool_stats)
    rounds.replace_adder()
