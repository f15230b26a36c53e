"""Activation: the platform names our classes, the engine core introduces its workers."""

from __future__ import annotations

import functools
import os
from typing import Any

from kvtide.engines import family
from kvtide.errors import KvtideError
from kvtide.observe import logs
from kvtide.settings import Settings

__all__ = ["activate"]

_SCHEDULER = "kvtide.engines.vllm.scheduler.make_scheduler"
_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "kvtide.engines.vllm.cpu_worker.ElasticCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "kvtide.engines.vllm.gpu_worker.ElasticGPUWorker",
}

_active = False


def activate() -> None:
    """Put this process of vLLM under kvtide; once. Ends the server on a clear error."""
    global _active
    if _active:
        return
    _active = True
    try:
        settings = Settings.from_environ()
        logs.set_up(settings.log)
        family.join()
        _wrap_platform(settings)
        _wrap_engine_core()
        _wrap_endings()
    except KvtideError as error:
        family.end_server(error)


def _wrap_platform(settings: Settings) -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        if vllm_config.model_config is None:
            return
        try:
            _take_over(vllm_config, settings)
        except KvtideError as error:
            family.end_server(error)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _take_over(config: Any, settings: Settings) -> None:
    """Name our classes in an engine's configuration, and register the engine."""
    from kvtide.engines.vllm import supported
    from kvtide.engines.vllm.capacity import fix_capacity
    from kvtide.engines.vllm.devices import devices_of

    parallel, scheduler = config.parallel_config, config.scheduler_config
    if parallel.worker_cls in _WORKERS.values():
        return
    supported.check(config, _WORKERS)
    parallel.worker_cls = _WORKERS[parallel.worker_cls]
    scheduler.scheduler_cls = _SCHEDULER
    fix_capacity(config, settings)
    if os.getpid() == _registering_pid():
        from kvtide.engines.seats import take_seats

        take_seats(settings, supported.default_name(config), devices_of(config, settings))


def _registering_pid() -> int:
    """Only the outermost process registers; the others find what it took."""
    return os.getpid() if family.join() else 0


def _wrap_engine_core() -> None:
    from vllm.v1.engine.core import EngineCore

    from kvtide.engines.vllm import fitting, introduction

    fitting.wrap_sizing()
    original = EngineCore._initialize_kv_caches

    @functools.wraps(original)
    def initialize_kv_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        introduction.introduce(self)
        return result

    EngineCore._initialize_kv_caches = initialize_kv_caches


def _wrap_endings() -> None:
    """vLLM ends its own processes by force when it closes: no death is unexpected then."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import BackgroundResources, MPClient

    for owner, name in (
        (MPClient, "shutdown"),
        (BackgroundResources, "__call__"),
        (EngineCore, "shutdown"),
    ):
        _announce(owner, name)


def _announce(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def ending(self: Any, *args: Any, **kwargs: Any) -> Any:
        family.closing()
        return original(self, *args, **kwargs)

    setattr(owner, name, ending)
