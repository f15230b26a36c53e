"""One SGLang server on a device that is too small for what it is asked gives native tokens."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from fleet import Sampler, assert_within_budget, prompts_of, tokens_of, until

from kvtide.units import MIB
from kvtide.verify.sglang_servers import SGLangServer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="needs SGLang"),
]


READY_SECONDS = 800


class Case(NamedTuple):
    """A model, the device it is served on, and what is asked."""

    kind: str
    device_bytes: int
    arguments: tuple[str, ...] = ()
    requests: int = 16
    longest: int = 300
    max_tokens: int = 64


CASES = {
    "llama": Case("llama-wide", 96 * MIB, requests=24),
    "llama-page16": Case("llama-wide", 96 * MIB, ("--page-size", "16"), requests=24),
    "mla": Case("deepseek-dense", 32 * MIB, requests=12),
    "gemma3": Case("gemma3", 32 * MIB, requests=40),
    "windows": Case("cohere2", 48 * MIB, ("--swa-full-tokens-ratio", "0.5"), requests=40),
    "lfm2": Case("lfm2", 48 * MIB),
}


class Pair(NamedTuple):
    """A server under kvtide and what a native one answered: twice, the second time from cache."""

    case: Case
    fleet: object
    server: SGLangServer
    prompts: list[list[int]]
    native: list[list[tuple[int, ...]]]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, sglang_fleet: Callable[[int], object]) -> Iterator[Pair]:
    case = CASES[request.param]
    fleet = sglang_fleet(case.device_bytes)
    prompts = prompts_of(7, case.requests, 50, case.longest)
    plain = ("--max-total-tokens", "20000", "--mem-fraction-static", "0.5")
    # Both start at once: most of it is the engine's imports.
    reference = fleet.start(case.kind, None, *plain, *case.arguments)
    server = fleet.start(case.kind, "a", "--mem-fraction-static", "0.9", *case.arguments)
    reference.wait_ready(READY_SECONDS)
    answers = [reference.ask(prompts, case.max_tokens) for _ in range(2)]
    reference.stop()
    server.wait_ready(READY_SECONDS)
    yield Pair(
        case,
        fleet,
        server,
        prompts,
        [tokens_of(a) for a in answers],
    )
    fleet.stop()


def test_tokens_are_native(pair: Pair) -> None:
    with Sampler(pair.fleet) as sampler:
        for native in pair.native:
            assert tokens_of(pair.server.ask(pair.prompts, pair.case.max_tokens)) == native
    assert_within_budget(sampler.samples)
    # It held more than at its start meanwhile, and never all that it has addresses for.
    first, most = sampler.samples[0].charges["a"], sampler.peak("a")
    print(f"charged {first >> 20} MiB at first, {most >> 20} MiB at most")
    assert most > first


def test_memory_goes_when_the_cache_is_flushed(pair: Pair) -> None:
    pair.server.ask(pair.prompts[:4], 8)
    until(lambda: pair.fleet.instance("a").state.name == "SLEEPING", 120, "it is idle")
    before = pair.fleet.held_bytes()
    pair.server.drop_cache()
    after = pair.fleet.held_bytes()
    pools = pair.fleet.instance("a").pools
    assert after == sum(pool.figures.pinned_bytes for pool in pools) <= before
    # It serves on, and its leak checks have found nothing.
    assert tokens_of(pair.server.ask(pair.prompts[:2], pair.case.max_tokens)) == pair.native[0][:2]
    assert pair.server.healthy()
    assert "leak" not in pair.server.log.read_text().lower().replace("nanobind", "")


def call(server: SGLangServer, path: str, body: dict) -> None:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


def test_memory_is_released_on_request_and_it_serves_again_when_resumed(pair: Pair) -> None:
    pair.server.ask(pair.prompts[:4], 8)
    until(lambda: pair.fleet.instance("a").state.name == "SLEEPING", 120, "it is idle")
    call(pair.server, "/release_memory_occupation", {"tags": ["kv_cache"]})
    pools = pair.fleet.instance("a").pools
    assert pair.fleet.held_bytes() == sum(pool.figures.pinned_bytes for pool in pools)
    call(pair.server, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert tokens_of(pair.server.ask(pair.prompts[:2], pair.case.max_tokens)) == pair.native[0][:2]


def test_states_come_and_go_as_keys_and_values_do(pair: Pair) -> None:
    if pair.case.kind != "lfm2":
        pytest.skip("this model has no recurrent states")

    def states():
        (pool,) = (p for p in pair.fleet.instance("a").pools if p.name == "state")
        return pool

    pair.server.drop_cache()
    at_first = states().mapped_bytes
    assert at_first == states().figures.pinned_bytes
    # Every one of them leaves a state in the cache: more than what is mapped at all times holds.
    # Their keys and values are short, so that they are not what fills the device.
    short = prompts_of(13, 2200, 3, 3)
    first = tokens_of(pair.server.ask(short, 1, concurrency=60))
    grown = states().mapped_bytes
    cached = states().figures.blocks_cached
    print(f"states: {at_first >> 20} MiB mapped at first, {grown >> 20} MiB with {cached} cached")
    assert grown > at_first
    assert cached > 2047
    again = pair.server.ask(short[:60], 1)
    assert tokens_of(again) == first[:60]
    pair.server.drop_cache()
    assert states().mapped_bytes == at_first
    assert tokens_of(pair.server.ask(short[:60], 1)) == first[:60]
    assert "memory leak" not in pair.server.log.read_text()
