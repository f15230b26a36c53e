"""What is around SGLang's scheduling rounds: each function takes the original first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtide.engines import family
from kvtide.engines.sglang import current
from kvtide.errors import KvtideError

__all__ = [
    "allocatable",
    "allocate_prompts",
    "choose_prompts",
    "decode_fits",
    "flush_cache",
    "make_scheduler",
    "next_batch",
    "on_idle",
    "pool_stats",
    "replace_adder",
    "retract",
]

_depth = 0


def make_scheduler(
    original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """Make SGLang's scheduler, and its tide once all of it is there."""
    original(scheduler, *args, **kwargs)
    try:
        from kvtide.engines.sglang.supported import check_scheduler
        from kvtide.engines.sglang.tide import Tide

        check_scheduler(scheduler)
        current.set_tide(Tide(scheduler))
    except KvtideError as error:
        family.end_server(error)


def next_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """A round: memory first, then SGLang's choice. A round within a round is SGLang's alone."""
    global _depth
    tide = current.tide()
    if _depth == 0 and tide is not None:
        tide.begin(kwargs["running_batch"] if "running_batch" in kwargs else args[0])
    _depth += 1
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        _depth -= 1


def on_idle(original: Callable[..., None], scheduler: Any) -> None:
    """Nothing can run: tell so, and sleep if only memory is missing."""
    tide = current.tide()
    if tide is not None:
        tide.idle()
    original(scheduler)


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Flush, and give the memory back."""
    flushed = original(scheduler, *args, **kwargs)
    tide = current.tide()
    if flushed and tide is not None:
        tide.flushed()
    return flushed


def allocatable(original: Callable[..., int], scheduler: Any, *args: Any, **kwargs: Any) -> int:
    """How many requests may start: no more than there is state for."""
    allowed = original(scheduler, *args, **kwargs)
    tide = current.tide()
    room = None if tide is None else tide.states_room()
    if room is None:
        return allowed
    running = args[0] if args else kwargs["running_bs"]
    return max(0, min(allowed, room - running))


def pool_stats(original: Callable[..., Any], observer: Any) -> Any:
    """SGLang's checks and gauges see what there could be, mapped or not."""
    from kvtide.engines.sglang.allocators import Conserving

    with Conserving():
        return original(observer)


def choose_prompts(original: Any, *args: Any, **kwargs: Any) -> Any:
    """See `misses`."""
    from kvtide.engines.sglang import misses

    return misses.choose_prompts(original, *args, **kwargs)


def allocate_prompts(original: Any, *args: Any, **kwargs: Any) -> Any:
    """See `misses`."""
    from kvtide.engines.sglang import misses

    return misses.allocate_prompts(original, *args, **kwargs)


def retract(original: Any, *args: Any, **kwargs: Any) -> Any:
    """See `misses`."""
    from kvtide.engines.sglang import misses

    return misses.retract(original, *args, **kwargs)


def decode_fits(original: Any, *args: Any, **kwargs: Any) -> Any:
    """See `misses`."""
    from kvtide.engines.sglang import misses

    return misses.decode_fits(original, *args, **kwargs)


def replace_adder() -> None:
    """Have SGLang choose prompts with `admission.ElasticPrefillAdder`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvtide.engines.sglang.admission import ElasticPrefillAdder

    HookRegistry.register(
        "sglang.srt.managers.schedule_policy.PrefillAdder", ElasticPrefillAdder, HookType.REPLACE
    )
