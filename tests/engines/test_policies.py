"""Who gets memory, with real servers: limits, mins, priorities, reservations, deadlines."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from fleet import (
    Asking,
    Ballast,
    Fleet,
    Sample,
    Sampler,
    ask,
    assert_within_budget,
    prompts_of,
    tokens_of,
    until,
)

from kvtide import control
from kvtide.ledger import Granted, Ledger, State
from kvtide.units import MIB
from kvtide.verify.client import metric, post
from kvtide.verify.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

DEVICE_BYTES = 64 * MIB
BLOCK_TOKENS = 32
# 16 KiB a token, in four parts of the arena, each mapped by 2 MiB.
SMALLEST_BYTES = 4 * 2 * MIB
LONGEST = 3520
ARGUMENTS = ("--block-size", str(BLOCK_TOKENS), "--max-model-len", str(LONGEST))
RESERVED_BYTES = 24 * MIB
WAIT_SECONDS = 20.0


class Pair(NamedTuple):
    """Two servers on one device, and what was seen while the second one started."""

    fleet: Fleet
    a: Server
    b: Server
    start: list[Sample]
    reserved: list[int]

    def steer(self, name: str, **terms: int | None) -> None:
        control.set(name, directory=self.fleet.ledgers, **terms)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair(make_fleet: Callable[[int], Fleet]) -> Iterator[Pair]:
    """`a` fills the device with its cache; `b`, which may wait 20 s, reserves when it starts."""
    fleet = make_fleet(DEVICE_BYTES)
    a = fleet.start("llama-wide", "a", *ARGUMENTS).wait_ready()
    tokens_of(ask(a, prompts_of(31, 10, 320, 340), 16))
    assert fleet.charge("a") >= DEVICE_BYTES - 2 * SMALLEST_BYTES
    reserved: list[int] = []
    with Sampler(fleet) as sampler:
        b = fleet.start(
            "llama-wide",
            "b",
            *ARGUMENTS,
            environ={
                "KVTIDE_INTERNAL_RESERVE": f"{RESERVED_BYTES},1",
                "KVTIDE_WAIT_DEADLINE": str(WAIT_SECONDS),
            },
        )
        while not b.healthy():
            assert b.exit_status() is None, b.log_tail()
            found = fleet.instance("b")
            reserved.append(found.loading_bytes if found else 0)
            time.sleep(0.05)
    yield Pair(fleet, a, b, sampler.samples, reserved)
    fleet.stop()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Default terms, and nothing cached."""
    if "pair" not in request.fixturenames:
        return
    pair: Pair = request.getfixturevalue("pair")
    for server, name in ((pair.a, "a"), (pair.b, "b")):
        pair.steer(name, limit=None, min=0, priority=0, headroom=0)
        post(server.url, "/reset_prefix_cache")
        until(lambda n=name: pair.fleet.charge(n) == SMALLEST_BYTES, 120, f"{name} is empty")


def preemptions(server: Server) -> float:
    return metric(server.url, "vllm:num_preemptions_total")


def test_a_starting_engines_reservation_is_made_room_for(pair: Pair) -> None:
    assert max(pair.reserved) == RESERVED_BYTES
    assert pair.reserved[-1] == 0
    lowest = min(s.budget_bytes for s in pair.start)
    assert lowest == DEVICE_BYTES - RESERVED_BYTES
    while_reserved = [s for s in pair.start if s.budget_bytes == lowest]
    assert while_reserved[-1].charged_bytes <= lowest, "idle cache went for it"
    assert pair.start[-1].budget_bytes == DEVICE_BYTES


def test_limits_lowered_and_raised_under_load(pair: Pair) -> None:
    prompts = prompts_of(37, 24, 250, 400)
    free = tokens_of(ask(pair.a, prompts, 48))
    full_bytes = pair.fleet.charge("a")
    assert full_bytes >= DEVICE_BYTES - 3 * SMALLEST_BYTES
    # Idle it holds the null block's extents alone; a quarter on top.
    limit_bytes = SMALLEST_BYTES + (full_bytes - SMALLEST_BYTES) // 4
    with Sampler(pair.fleet) as sampler:
        asking = Asking(pair.a, prompts, 48)
        until(lambda: pair.fleet.instance("a").state is State.RUNNING, 120, "load")
        control.limit("a", limit_bytes, directory=pair.fleet.ledgers)
        lowered = time.monotonic()
        took = until(lambda: pair.fleet.charge("a") <= limit_bytes, 120, "it comes below its limit")
        assert tokens_of(asking.join()) == free
    print(f"below its limit {took:.3f} s after it was lowered under load")
    charges = [s.charges["a"] for s in sampler.samples if s.seconds > lowered + 0.02]
    for earlier, later in itertools.pairwise(charges):
        assert later <= max(earlier, limit_bytes), "it grew above its limit"
    with Sampler(pair.fleet) as sampler:
        assert tokens_of(ask(pair.a, prompts, 48)) == free
    assert_within_budget(sampler.samples)
    for sample in sampler.samples:
        assert sample.charges["a"] <= limit_bytes + 2 * MIB
    control.limit("a", None, directory=pair.fleet.ledgers)
    with Sampler(pair.fleet) as sampler:
        assert tokens_of(ask(pair.a, prompts, 48)) == free
    assert sampler.peak("a") > 2 * limit_bytes


def _lower_the_limit_of_a_sleeper(pair: Pair) -> float:
    """Seconds from lowering the limit of an engine that sleeps until its cache is below it."""
    tokens_of(ask(pair.a, prompts_of(31, 10, 320, 340), 16))
    until(lambda: pair.fleet.instance("a").state is State.SLEEPING, 120, "a sleeps")
    limit_bytes = 3 * SMALLEST_BYTES
    assert pair.fleet.charge("a") > limit_bytes
    control.limit("a", limit_bytes, directory=pair.fleet.ledgers)
    took = until(lambda: pair.fleet.charge("a") <= limit_bytes, 120, "its cache went")
    print(f"idle memory above the limit gone after {took * 1000:.0f} ms")
    assert pair.fleet.instance("a").state is State.SLEEPING
    return took


def test_an_idle_engine_goes_below_a_lower_limit_in_its_sleep(pair: Pair) -> None:
    _lower_the_limit_of_a_sleeper(pair)
    # Its extents are given whole: what it keeps is what one more would have taken below.
    assert pair.fleet.charge("a") >= SMALLEST_BYTES


@pytest.mark.timed
def test_an_idle_engine_is_below_a_lower_limit_within_100_ms(pair: Pair) -> None:
    assert _lower_the_limit_of_a_sleeper(pair) < 0.1


def test_raising_a_limit_goes_on_without_another_request(pair: Pair) -> None:
    limit_bytes = 3 * SMALLEST_BYTES
    control.limit("a", limit_bytes, directory=pair.fleet.ledgers)
    # With its answer each would fit below the limit alone, of which 1,024 tokens are.
    (prompt,) = prompts_of(41, 1, 600, 600)
    alone = tokens_of(ask(pair.a, [prompt], 16))
    post(pair.a.url, "/reset_prefix_cache")
    asking = Asking(pair.a, [prompt, *prompts_of(43, 8, 400, 500)], 300)
    until(
        lambda: preemptions(pair.a) > 0 or pair.fleet.charge("a") == limit_bytes, 120, "it is full"
    )
    time.sleep(1)
    assert pair.fleet.charge("a") <= limit_bytes
    control.limit("a", None, directory=pair.fleet.ledgers)
    took = until(lambda: pair.fleet.charge("a") > limit_bytes, 120, "it grows again")
    print(f"grows {took:.3f} s after its limit was raised")
    assert tokens_of(asking.join())[0][:16] == alone[0]


def test_a_lower_limit_now_preempts_running_requests(pair: Pair) -> None:
    prompts = prompts_of(47, 12, 400, 500)
    free = tokens_of(ask(pair.a, prompts, 200))
    post(pair.a.url, "/reset_prefix_cache")
    before = preemptions(pair.a)
    asking = Asking(pair.a, prompts, 200)
    until(lambda: pair.fleet.charge("a") >= DEVICE_BYTES - 3 * SMALLEST_BYTES, 120, "a is full")
    limit_bytes = 3 * SMALLEST_BYTES
    control.limit("a", limit_bytes, now=True, directory=pair.fleet.ledgers)
    took = until(lambda: pair.fleet.charge("a") <= limit_bytes, 120, "requests were preempted")
    print(f"below a limit of running requests after {took:.3f} s")
    control.limit("a", None, directory=pair.fleet.ledgers)
    assert tokens_of(asking.join()) == free
    # Counted when a preempted request answers again.
    assert preemptions(pair.a) > before


def full_load(pair: Pair, seconds: float) -> tuple[Asking, list[list[int]]]:
    """`b` holds all it can, by running requests, for some while."""
    prompts = prompts_of(53, 40, 400, 500)
    asking = Asking(pair.b, prompts, 160)
    full = DEVICE_BYTES - SMALLEST_BYTES - 2 * SMALLEST_BYTES
    until(lambda: pair.fleet.charge("b") >= full, seconds, "b is full")
    return asking, prompts


def wish_to_grant(samples: list[Sample], name: str, size_bytes: int) -> float:
    wished = next(s.seconds for s in samples if s.wishes[name])
    got = next(s.seconds for s in samples if s.seconds > wished and s.charges[name] >= size_bytes)
    return got - wished


def _recover_a_min(pair: Pair) -> float:
    """Seconds from a's wish until its min is its again, while `b` is at full load."""
    (prompt,) = prompts_of(59, 1, 900, 900)
    alone = tokens_of(ask(pair.a, [prompt], 32))
    needed_bytes = pair.fleet.charge("a")
    post(pair.a.url, "/reset_prefix_cache")
    until(lambda: pair.fleet.charge("a") == SMALLEST_BYTES, 120, "a is empty")
    pair.steer("a", min=needed_bytes)
    before = preemptions(pair.b)
    asking, prompts = full_load(pair, 120)
    with Sampler(pair.fleet, quick=True) as sampler:
        assert tokens_of(ask(pair.a, [prompt], 32)) == alone
        assert asking.running, "b was at full load throughout"
    took = wish_to_grant(sampler.samples, "a", needed_bytes - SMALLEST_BYTES)
    print(f"min recovered {took:.3f} s after the wish; load {os.getloadavg()[0]:.1f}")
    assert_within_budget(sampler.samples)
    served = tokens_of(asking.join())
    assert preemptions(pair.b) > before
    assert served == tokens_of(ask(pair.b, prompts, 160))
    return took


def test_a_min_is_recovered_from_a_neighbour_at_full_load(pair: Pair) -> None:
    _recover_a_min(pair)


@pytest.mark.timed
def test_a_min_is_recovered_from_a_neighbour_at_full_load_within_a_second(pair: Pair) -> None:
    assert _recover_a_min(pair) < 1.0


def test_three_priorities_under_one_pressure(pair: Pair) -> None:
    """The lowest gives first what it caches, then the next, and who has the highest gets it."""
    mine = {"a": prompts_of(73, 4, 320, 340), "b": prompts_of(79, 4, 320, 340)}
    tokens = {
        "a": tokens_of(ask(pair.a, mine["a"], 16)),
        "b": tokens_of(ask(pair.b, mine["b"], 16)),
    }
    pair.steer("a", priority=5)
    cached = {name: pair.fleet.charge(name) for name in mine}
    assert min(cached.values()) >= 2 * SMALLEST_BYTES
    (path,) = Ledger.existing(pair.fleet.ledgers)
    ledger = Ledger.attach(path)
    third = ledger.register("third", explicit=True, priority=9)
    account = ledger.enroll(
        third,
        pool_name="kv",
        rank=0,
        blocks_total=1,
        block_bytes=1,
        sampler=lambda: DEVICE_BYTES - pair.fleet.held_bytes(),
    )

    def gets(size_bytes: int) -> None:
        """It asks as an engine does: wishes, and tries again until it is granted."""
        third.wish(size_bytes)
        until(lambda: isinstance(account.grant(size_bytes), Granted), 120, "it is served")
        third.wish(0)

    try:
        free_bytes = DEVICE_BYTES - sum(cached.values())
        gets(free_bytes + cached["b"] - SMALLEST_BYTES)
        assert pair.fleet.charge("b") < cached["b"], "the lowest priority gave"
        assert pair.fleet.charge("a") == cached["a"], "the next one kept all of its cache"
        gets(cached["a"] - SMALLEST_BYTES)
        assert pair.fleet.charge("a") < cached["a"]
    finally:
        account.close()
        third.close()
        ledger.close()
    assert tokens_of(ask(pair.a, mine["a"], 16)) == tokens["a"]
    assert tokens_of(ask(pair.b, mine["b"], 16)) == tokens["b"]


def test_higher_priority_is_served_by_preempting_lower(pair: Pair) -> None:
    (prompt,) = prompts_of(61, 1, 1500, 1500)
    alone = tokens_of(ask(pair.a, [prompt], 32))
    post(pair.a.url, "/reset_prefix_cache")
    until(lambda: pair.fleet.charge("a") == SMALLEST_BYTES, 120, "a is empty")
    pair.steer("a", priority=10)
    asking, prompts = full_load(pair, 120)
    with Sampler(pair.fleet, quick=True) as sampler:
        assert tokens_of(ask(pair.a, [prompt], 32)) == alone
        assert asking.running
    print(f"served after {wish_to_grant(sampler.samples, 'a', 24 * MIB):.3f} s")
    assert_within_budget(sampler.samples)
    assert tokens_of(asking.join()) == tokens_of(ask(pair.b, prompts, 160))


def test_who_does_not_answer_is_named_when_a_deadline_passes(pair: Pair) -> None:
    tokens_of(ask(pair.a, prompts_of(31, 10, 320, 340), 16))
    assert pair.fleet.charge("a") >= DEVICE_BYTES - 2 * SMALLEST_BYTES
    stopped = pair.a.pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        (prompt,) = prompts_of(67, 1, 1500, 1500)
        started = time.monotonic()
        asking = Asking(pair.b, [prompt], 8)
        until(lambda: pair.fleet.instance("a").silent, 120, "a is passed over")
        (answer,) = asking.join()
        waited = time.monotonic() - started
        assert answer.error is not None
        assert "status 500" in answer.error
        assert waited > WAIT_SECONDS - 1
        (said,) = [
            line for line in pair.b.log.read_text().splitlines() if "KVTIDE_WAIT_DEADLINE)" in line
        ]
        assert "1500 tokens waited" in said
        assert "b asks for" in said
        assert "does not answer, process" in said
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    # Woken, it gives at once, and both are well.
    tokens_of(ask(pair.b, [prompt], 8))
    assert not pair.fleet.instance("a").silent
    tokens_of(ask(pair.a, [prompt], 8))


def test_a_trim_takes_what_is_cached(pair: Pair) -> None:
    prompts = prompts_of(31, 10, 320, 340)
    before = tokens_of(ask(pair.a, prompts, 16))
    (trimmed,) = control.trim("a", wait_seconds=10, directory=pair.fleet.ledgers)
    until(lambda: pair.fleet.charge("a") == SMALLEST_BYTES, 120, "nothing is cached")
    assert trimmed.before_bytes >= DEVICE_BYTES - 2 * SMALLEST_BYTES
    assert tokens_of(ask(pair.a, prompts, 16)) == before


def test_two_that_start_together_on_a_full_device(make_fleet: Callable[[int], Fleet]) -> None:
    """Room for one null block is left: one gets it, the other waits, shown, until there is more."""
    fleet = make_fleet(DEVICE_BYTES)
    ballast = Ballast(fleet, DEVICE_BYTES - SMALLEST_BYTES)
    try:
        servers = [fleet.start("llama-wide", name, *ARGUMENTS) for name in ("c", "d")]

        def states() -> list[State]:
            if not list(fleet.ledgers.glob("*.ledger")):
                return []
            return [i.state for i in fleet.snapshot().instances]

        until(lambda: State.WAITING in states(), 200, "one waits")
        until(lambda: any(s.healthy() for s in servers), 200, "the other serves")
        assert states().count(State.WAITING) == 1
        assert fleet.snapshot().charged_bytes == SMALLEST_BYTES
        ballast.hold(0)
        until(lambda: all(s.healthy() for s in servers), 200, "both serve")
        prompts = prompts_of(71, 4, 100, 200)
        answers = [tokens_of(ask(server, prompts, 16)) for server in servers]
        assert answers[0] == answers[1]
    finally:
        ballast.close()
    fleet.stop()
