"""Requests whose wait for memory has a deadline."""

import math
from dataclasses import dataclass, field

import pytest

from kvtide.engines.vllm.overdue import Overdue
from kvtide.ledger import Ledger, PoolFigures
from kvtide.ranks.seat import Seat
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec


@dataclass
class Request:
    request_id: str
    num_tokens: int = 100


@dataclass
class Memory:
    seats: dict
    untils: list = field(default_factory=list)

    def wait_until(self, until_ns):
        self.untils.append(until_ns)


@pytest.fixture
def memory(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    me, _ = enroll(ledger, "me")
    _, other = enroll(ledger, "other")
    other.grant(TOTAL)
    other.publish(PoolFigures(1, 1, 1, 1, idle_bytes=10 * MIB, pinned_bytes=2 * MIB))
    me.wish(60 * MIB)
    yield Memory({"host": Seat(ledger, me)})
    ledger.close()


def test_a_request_that_waited_too_long_is_named_with_who_holds_what(memory):
    now = [100.0]
    overdue = Overdue(memory, 5.0, clock=lambda: now[0])
    first, second = Request("a"), Request("b")
    assert overdue.find([first]) == {}
    assert overdue.left_seconds == 5.0
    assert memory.untils[-1] == 105 * 10**9
    now[0] = 103.0
    assert overdue.find([first, second]) == {}
    now[0] = 105.0
    (late,) = overdue.find([first, second]).items()
    assert late[0] == "a"
    for said in (
        "100 tokens waited for memory for 5.0 s (KVTIDE_WAIT_DEADLINE)",
        "me asks for 60MiB of host, and 0B of its budget of 256MiB are free",
        "other 256MiB (starting, 10MiB idle)",
        "kvtide trim other; kvtide limit other 196MiB --now",
    ):
        assert said in late[1]


def test_who_got_on_in_between_begins_anew(memory):
    now = [0.0]
    overdue = Overdue(memory, 5.0, clock=lambda: now[0])
    overdue.find([Request("a")])
    now[0] = 4.0
    overdue.find([Request("b")])  # a runs
    now[0] = 6.0
    assert overdue.find([Request("a")]) == {}
    overdue.forget()
    now[0] = 20.0
    assert overdue.find([Request("a")]) == {}


def test_without_a_deadline_nobody_is_ever_late(memory):
    overdue = Overdue(memory, None)
    assert overdue.find([Request("a")]) == {}
    assert overdue.left_seconds == math.inf
    assert memory.untils == []
