"""What kvtide supports of vLLM: everything else is refused by name before memory is taken."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import vllm

from kvtide.engines.vllm.eras import choose_reader
from kvtide.errors import UnsupportedError
from kvtide.settings import check_name

__all__ = ["check", "default_name"]


def check(config: Any, workers: Container[str]) -> None:
    """Refuse what would break silently.

    Raises
    ------
    UnsupportedError
        Names the feature and what is supported.
    """
    worker = config.parallel_config.worker_cls
    if worker not in workers:
        raise UnsupportedError(
            f"vLLM {vllm.__version__} would use the worker class {worker}; kvtide supports its own "
            "CPU and CUDA workers: start without --worker-cls, or with KVTIDE=0"
        )
    scheduler = config.scheduler_config.scheduler_cls
    if scheduler is not None:
        raise UnsupportedError(
            f"the scheduler class {scheduler!r} is not supported: kvtide brings its own; start "
            "without --scheduler-cls, or with KVTIDE=0"
        )
    replicas = config.parallel_config.data_parallel_size
    if replicas > 1:
        raise UnsupportedError(
            f"data parallelism (--data-parallel-size {replicas}) is not supported: each replica "
            "has a scheduler, and a server has one place on a device for one; start one server for "
            "each replica, or with KVTIDE=0"
        )
    if config.kv_transfer_config is not None:
        raise UnsupportedError(
            f"the KV connector {config.kv_transfer_config.kv_connector!r} assumes a KV cache that "
            "stays mapped, and is not supported; supported is vLLM without --kv-transfer-config, "
            "with or without prefix caching"
        )
    if config.model_config.enable_sleep_mode:
        raise UnsupportedError(
            "--enable-sleep-mode is not supported: an idle engine under kvtide gives its KV memory "
            "back by itself; start without the flag"
        )
    if config.model_config.is_diffusion:
        raise UnsupportedError(
            f"the model {config.model_config.model} generates by discrete diffusion, for which "
            "vLLM has another scheduler: not supported; start it with KVTIDE=0"
        )
    choose_reader()


def default_name(config: Any) -> str:
    """`vllm-<served model>`, in characters that a name may have."""
    served = config.model_config.served_model_name
    if isinstance(served, list):
        served = served[0]
    # A path serves under its last part: a name has no slashes.
    last = str(served).rstrip("/").rpartition("/")[2]
    return check_name("vllm-" + "".join(c if c.isprintable() and c != " " else "_" for c in last))
