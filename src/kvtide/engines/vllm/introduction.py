"""Between the workers' start and the scheduler's: what every worker tells of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvtide.engines import family
from kvtide.errors import KvtideError
from kvtide.ranks.messages import Description, decode_description

__all__ = ["Introduction", "introduce", "take"]


class Introduction(NamedTuple):
    """The workers of one engine, and how its main loop is woken (None: it has none)."""

    descriptions: tuple[Description, ...]
    wake_engine: Callable[[], None] | None


_last: Introduction | None = None


def introduce(core: Any) -> None:
    """Ask all workers of an engine core to describe their memory; `take` hands it on."""
    global _last
    answers = core.model_executor.collective_rpc("kvtide_describe")
    descriptions = tuple(decode_description(answer) for answer in answers if answer is not None)
    _last = Introduction(descriptions, _wake_call(core))


def take() -> Introduction:
    """What was introduced last in this process: the scheduler is made right after it."""
    global _last
    if _last is None:
        family.end_server(
            KvtideError("vLLM made a scheduler before its workers had a KV cache; this is a bug")
        )
    introduction, _last = _last, None
    return introduction


def _wake_call(core: Any) -> Callable[[], None] | None:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(core, EngineCoreProc):
        return None

    def wake() -> None:
        # Looked up late: the queue is made after the scheduler.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    return wake
