"""vLLM's schedulers with elastic memory around each step."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvtide.engines import family
from kvtide.engines.vllm.tide import Tide
from kvtide.errors import KvtideError

__all__ = ["ElasticAsyncScheduler", "ElasticScheduler", "make_scheduler"]

_log = logging.getLogger("vllm.kvtide")

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _Elastic(_Base):
    """Mixin before a vLLM scheduler class.

    Blocks come free at once, as natively, though a step in flight may still touch them: another
    request uses them behind that step, and every rank unmaps behind all that was queued before its
    order. vLLM's fence for connectors (`defer_block_free`) would let a miss preempt one request
    after the other, since none of them frees anything in time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            self.tide = Tide(self)
        except KvtideError as error:
            family.end_server(error)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.tide.begin()
            output = super().schedule(*args, **kwargs)
            self.tide.end(output)
        except KvtideError as error:
            family.end_server(error)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if self.tide.hopeless:
            self._end_hopeless(outputs)
        return outputs

    def _end_hopeless(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End the requests for which the memory can never come, with an error for the client."""
        status = RequestStatus.FINISHED_ERROR
        for request_id, why in self.tide.hopeless.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            _log.error("kvtide: request %s was refused: its %s", request_id, why)
            self.finish_requests(request_id, status)
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id, [], finish_reason=RequestStatus.get_finished_reason(status)
                )
            )
        self.tide.hopeless.clear()

    def has_requests(self) -> bool:
        tide = self.tide
        try:
            if tide.wants_step():
                return True
        except KvtideError as error:
            family.end_server(error)
        if tide.asleep:
            tide.wait_here()
            return tide.watch.called or bool(self.has_finished_requests())
        return bool(super().has_requests())

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        self.tide.wake()
        return super().add_request(*args, **kwargs)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        self.tide.came_free()
        return super().finish_requests(*args, **kwargs)

    def shutdown(self) -> None:
        super().shutdown()
        self.tide.close()


class ElasticScheduler(_Elastic, Scheduler):  # type: ignore[misc]
    """Elastic memory, one step at a time."""


class ElasticAsyncScheduler(_Elastic, AsyncScheduler):  # type: ignore[misc]
    """Elastic memory, scheduling ahead of the outputs."""


def make_scheduler(vllm_config: Any, **kwargs: Any) -> ElasticScheduler | ElasticAsyncScheduler:
    """The elastic counterpart of the scheduler that vLLM would have made."""
    ahead = vllm_config.scheduler_config.async_scheduling
    kind = ElasticAsyncScheduler if ahead else ElasticScheduler
    return kind(vllm_config=vllm_config, **kwargs)
