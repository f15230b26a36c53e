"""Preempting a request whose output is on its way, as each era of vLLM can be told to."""

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

# vLLM's modules warn as they load, and they load inside of the tests.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def era_of(scheduler):
    from kvtide.engines.vllm.preemption import era_of

    return era_of(scheduler)


@dataclass
class Request:
    """As vLLM 0.26 has it."""

    num_output_placeholders: int = 0
    async_tokens_to_discard: int = 0
    num_in_flight_tokens: int = 0


@dataclass
class Told:
    calls: list[Any] = field(default_factory=list)


class Dropping(Told):
    def _preempt_request(self, request, timestamp, drop_stale_output=False):
        self.calls.append((request, drop_stale_output))


class Waiting(Told):
    def _preempt_request(self, request, timestamp):
        self.calls.append((request, None))


def test_where_vllm_can_drop_output_it_is_told_to():
    scheduler, request = Dropping(), Request(num_output_placeholders=1, num_in_flight_tokens=1)
    era = era_of(scheduler)
    assert era.may(request)
    era.preempt(scheduler, request)
    assert scheduler.calls == [(request, True)]
    assert request == Request(num_output_placeholders=1, num_in_flight_tokens=1)


def test_before_that_the_asynchronous_scheduler_discards_what_is_on_its_way():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    class Discarding(Waiting, AsyncScheduler):
        pass

    scheduler = Discarding()
    request = Request(num_output_placeholders=2, async_tokens_to_discard=1, num_in_flight_tokens=2)
    era = era_of(scheduler)
    assert era.may(request)
    era.preempt(scheduler, request)
    assert scheduler.calls == [(request, None)]
    # What an earlier preemption left to discard is still on its way too.
    assert (request.num_output_placeholders, request.async_tokens_to_discard) == (0, 3)


def test_before_that_another_scheduler_takes_only_what_no_step_computes():
    scheduler = Waiting()
    era = era_of(scheduler)
    assert not era.may(Request(num_in_flight_tokens=1))
    resting = Request()
    assert era.may(resting)
    era.preempt(scheduler, resting)
    assert scheduler.calls == [(resting, None)]
