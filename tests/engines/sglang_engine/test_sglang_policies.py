"""Who gets memory among SGLang servers: limits, mins, priorities, trims, long prompts at once."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from fleet import Sampler, assert_within_budget, prompts_of, tokens_of, until

from kvtide import control
from kvtide.units import MIB

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="needs SGLang"),
]

KIND = "llama-wide"
DEVICE_BYTES = 80 * MIB
CHUNK = 256
READY_SECONDS = 800
# Liveness only: nothing here holds a bar of seconds.
WAIT_SECONDS = 120


class Pair(NamedTuple):
    """Two servers on one device."""

    fleet: Any
    a: Any
    b: Any

    def steer(self, name: str, **terms: int | None) -> None:
        control.set(name, directory=self.fleet.ledgers, **terms)  # type: ignore[arg-type]

    def limit(self, size_bytes: int | None, *, now: bool = False) -> None:
        control.limit("a", size_bytes, now=now, directory=self.fleet.ledgers)

    def smallest(self, name: str) -> int:
        """What an idle server with an empty cache holds."""
        return sum(pool.figures.pinned_bytes for pool in self.fleet.instance(name).pools)


@pytest.fixture(scope="module")
def pair(sglang_fleet: Callable[[int], Any]) -> Iterator[Pair]:
    fleet = sglang_fleet(DEVICE_BYTES)
    plain = ("--mem-fraction-static", "0.9", "--chunked-prefill-size", str(CHUNK))
    servers = [fleet.start(KIND, name, *plain) for name in ("a", "b")]
    for server in servers:
        server.wait_ready(READY_SECONDS)
    yield Pair(fleet, *servers)
    fleet.stop()


@pytest.fixture(autouse=True)
def fresh(pair: Pair) -> Iterator[None]:
    """Default terms, and nothing cached; no slot is lost afterwards."""
    for server, name in ((pair.a, "a"), (pair.b, "b")):
        pair.steer(name, limit=None, min=0, priority=0, headroom=0)
        until(
            lambda n=name: pair.fleet.instance(n).state.name == "SLEEPING", WAIT_SECONDS, "it idles"
        )
        server.drop_cache()
        until(
            lambda n=name: pair.fleet.charge(n) == pair.smallest(n),
            WAIT_SECONDS,
            f"{name} is empty",
        )
    yield
    for server in (pair.a, pair.b):
        assert server.healthy()
        assert "memory leak" not in server.log.read_text()


def asking(server: Any, prompts: list[list[int]], tokens: int) -> Future:
    pool = ThreadPoolExecutor(1)
    job = pool.submit(server.ask, prompts, tokens)
    pool.shutdown(wait=False)
    return job


def retractions_of(server: Any) -> int:
    log = server.log.read_text(errors="replace")
    return sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log))


def retracted_for_others(server: Any) -> int:
    log = server.log.read_text(errors="replace")
    return sum(int(n) for n in re.findall(r"kvtide: (\d+) requests retracted for others", log))


def is_full(pair: Pair) -> bool:
    """Whether `b` holds all there is, but for one more growth, beside an empty `a`."""
    return pair.fleet.charge("b") >= DEVICE_BYTES - pair.smallest("a") - 16 * MIB


def full_load(pair: Pair) -> tuple[Future, list[list[int]]]:
    """`b` is asked for more than there is, and holds all of it."""
    prompts = prompts_of(53, 20, 300, 400)
    job = asking(pair.b, prompts, 160)
    pair.a.drop_cache()
    until(lambda: is_full(pair), WAIT_SECONDS, "b is full")
    return job, prompts


@pytest.mark.parametrize("terms", ["min", "priority"])
def test_running_requests_of_a_neighbour_make_room(pair: Pair, terms: str) -> None:
    (prompt,) = prompts_of(59, 1, 2500, 2500)
    alone = tokens_of(pair.a.ask([prompt], 32))
    needed_bytes = pair.fleet.charge("a")
    assert needed_bytes > pair.smallest("a") + 16 * MIB
    before = retracted_for_others(pair.b)
    pair.steer("a", **({"min": needed_bytes} if terms == "min" else {"priority": 10}))
    job, prompts = full_load(pair)
    with Sampler(pair.fleet) as sampler:
        # As often as it takes: what `b` has cached goes first, and may be enough.
        while retracted_for_others(pair.b) == before:
            assert not job.done(), "b was loaded throughout"
            pair.a.drop_cache()
            until(lambda: is_full(pair), WAIT_SECONDS, "b is full")
            assert tokens_of(pair.a.ask([prompt], 32)) == alone
    assert_within_budget(sampler.samples)
    served = tokens_of(job.result())
    assert served == tokens_of(pair.b.ask(prompts, 160))


def test_limits_lowered_and_raised_under_load(pair: Pair) -> None:
    prompts = prompts_of(37, 24, 200, 350)
    free = tokens_of(pair.a.ask(prompts, 64))
    full_bytes, least_bytes = pair.fleet.charge("a"), pair.smallest("a")
    pair.a.drop_cache()
    limit_bytes = least_bytes + (full_bytes - least_bytes) // 2
    with Sampler(pair.fleet) as sampler:
        job = asking(pair.a, prompts, 64)
        until(lambda: pair.fleet.charge("a") > limit_bytes, WAIT_SECONDS, "it is above")
        pair.limit(limit_bytes)
        until(lambda: pair.fleet.charge("a") <= limit_bytes, WAIT_SECONDS, "it comes below")
        assert tokens_of(job.result()) == free
        assert tokens_of(pair.a.ask(prompts, 64)) == free
    below = next(i for i, s in enumerate(sampler.samples[::-1]) if s.charges["a"] > limit_bytes)
    assert below > 10, "it stayed below its limit while it was asked again"
    pair.limit(None)
    pair.a.drop_cache()
    with Sampler(pair.fleet) as sampler:
        assert tokens_of(pair.a.ask(prompts, 64)) == free
    assert sampler.peak("a") > limit_bytes


def test_a_lower_limit_now_retracts_running_requests(pair: Pair) -> None:
    prompts = prompts_of(47, 12, 250, 300)
    free = tokens_of(pair.a.ask(prompts, 200))
    pair.a.drop_cache()
    before, limit_bytes = retracted_for_others(pair.a), pair.smallest("a") + 16 * MIB
    job = asking(pair.a, prompts, 200)
    until(lambda: pair.fleet.charge("a") > limit_bytes + 16 * MIB, WAIT_SECONDS, "a is full")
    pair.limit(limit_bytes, now=True)
    until(lambda: pair.fleet.charge("a") <= limit_bytes, WAIT_SECONDS, "requests were retracted")
    assert retracted_for_others(pair.a) > before
    assert not job.done()
    pair.limit(None)
    assert tokens_of(job.result()) == free


def test_raising_a_limit_goes_on_without_another_request(pair: Pair) -> None:
    prompts = prompts_of(41, 5, 1500, 1500)
    alone = tokens_of([pair.a.ask([prompt], 200)[0] for prompt in prompts])
    pair.a.drop_cache()
    limit_bytes = pair.smallest("a") + 16 * MIB
    pair.limit(limit_bytes)
    job = asking(pair.a, prompts, 200)
    until(lambda: pair.fleet.charge("a") == limit_bytes, WAIT_SECONDS, "it is at its limit")
    assert not job.done()
    pair.limit(None)
    until(lambda: pair.fleet.charge("a") > limit_bytes, WAIT_SECONDS, "it grows again")
    assert tokens_of(job.result()) == alone


def test_what_can_never_have_memory_is_answered_and_the_others_go_on(pair: Pair) -> None:
    long, short = prompts_of(43, 1, 3000, 3000), prompts_of(44, 2, 100, 100)
    alone = tokens_of(pair.a.ask(short, 16))
    pair.limit(pair.smallest("a") + 16 * MIB)
    job = asking(pair.a, long, 16)
    assert tokens_of(pair.a.ask(short, 16)) == alone
    (answer,) = job.result(WAIT_SECONDS)
    assert "3000 tokens can never have memory: the limit of a allows 2047" in answer.error
    assert tokens_of(pair.a.ask(short, 16)) == alone
    pair.limit(None)
    tokens_of(pair.a.ask(long, 16))


def test_a_trim_takes_what_is_cached(pair: Pair) -> None:
    prompts = prompts_of(31, 10, 320, 340)
    before = tokens_of(pair.a.ask(prompts, 16))
    held = pair.fleet.charge("a")
    assert held > pair.smallest("a")
    (trimmed,) = control.trim("a", wait_seconds=WAIT_SECONDS, directory=pair.fleet.ledgers)
    assert trimmed.before_bytes == held
    until(lambda: pair.fleet.charge("a") == pair.smallest("a"), WAIT_SECONDS, "nothing is cached")
    assert tokens_of(pair.a.ask(prompts, 16)) == before


def test_long_prompts_at_once_do_not_wait_for_each_other_for_ever(pair: Pair) -> None:
    """Each takes more than half of what there is; they are taken up in many chunks."""
    prompts = [prompts_of(seed, 2, 3000, 3000) for seed in (61, 67)]
    alone = []
    for server, own in zip((pair.a, pair.b), prompts, strict=True):
        alone.append(tokens_of([server.ask([prompt], 24)[0] for prompt in own]))
        server.drop_cache()
    for _ in range(2):
        jobs = [
            asking(server, own, 24) for server, own in zip((pair.a, pair.b), prompts, strict=True)
        ]
        found = [tokens_of(job.result(4 * WAIT_SECONDS)) for job in jobs]
        assert found == alone
