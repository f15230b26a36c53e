"""What engines call when they load their plugins: nothing at all unless `KVTIDE=1`."""

from __future__ import annotations

import os

__all__ = ["sglang", "vllm"]


def vllm() -> None:
    """Entry point of vLLM's plugin group `vllm.general_plugins`, run in each of its processes."""
    if os.environ.get("KVTIDE", "") in ("", "0"):
        return
    # Only here: with kvtide off, no other module of it may be loaded.
    from kvtide.engines.vllm.plugin import activate

    activate()


def sglang() -> None:
    """Entry point of SGLang's plugin group `sglang.srt.plugins`, run in most of its processes."""
    if os.environ.get("KVTIDE", "") in ("", "0"):
        return
    from kvtide.engines.sglang.plugin import activate

    activate()
