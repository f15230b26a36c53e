"""A plugin of vLLM that brings its old faulty rule back, when a test asks for it.

The rule divided the memory by the bytes of one layer of each group, and allocated for all of them.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def inject() -> None:
    """In every process of a server whose `PROBE_FAULT` is `one-layer-per-group`."""
    if os.environ.get("PROBE_FAULT") != "one-layer-per-group":
        return
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.get_kv_cache_config_from_groups

    @functools.wraps(original)
    def faulty(config: Any, groups: Any, available_memory: int) -> Any:
        layers = max(len(group.layer_names) for group in groups)
        return original(config, groups, available_memory * layers)

    kv_cache_utils.get_kv_cache_config_from_groups = faulty
