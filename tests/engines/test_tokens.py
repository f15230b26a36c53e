"""Two servers under one budget that is too small for both give the tokens of native vLLM."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from fleet import (
    Asking,
    Fleet,
    Sampler,
    ask,
    ask_together,
    assert_within_budget,
    likeliest,
    prompts_of,
    rpc,
    tokens_of,
)

from kvtide.units import MIB
from kvtide.verify.client import metric, post
from kvtide.verify.models import dtype_of
from kvtide.verify.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


class Case(NamedTuple):
    """A model, the device that is too small for two of it, and what they are asked."""

    kind: str
    device_bytes: int
    requests: int
    arguments: tuple[str, ...] = ()
    shortest: int = 100
    longest: int = 400
    max_tokens: int = 96


CASES = [
    Case("llama-wide", 64 * MIB, 24, ("--block-size", "32")),
    Case("gemma3", 16 * MIB, 48, ("--block-size", "32")),
    Case("qwen3next", 16 * MIB, 48),
    # Prefix caching, so that states are kept along the way: else a request has one block for ever.
    Case(
        "mamba2",
        20 * MIB,
        64,
        ("--enable-prefix-caching", "--mamba-cache-mode", "align", "--block-size", "64"),
        max_tokens=200,
    ),
]


class Trio(NamedTuple):
    """Two servers under kvtide, and what a native one answered."""

    case: Case
    fleet: Fleet
    servers: tuple[Server, Server]
    prompts: list[list[int]]
    native: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.kind)
def trio(request: pytest.FixtureRequest, make_fleet: Callable[[int], Fleet]) -> Iterator[Trio]:
    case: Case = request.param
    fleet = make_fleet(case.device_bytes)
    arguments = ("--max-model-len", "2048", *case.arguments)
    prompts = prompts_of(7, case.requests, case.shortest, case.longest)
    reference = fleet.start(case.kind, None, *arguments).wait_ready()
    native = tokens_of(ask(reference, prompts, case.max_tokens))
    reference.stop()
    servers = tuple(fleet.start(case.kind, name, *arguments) for name in ("a", "b"))
    for server in servers:
        server.wait_ready()
    yield Trio(case, fleet, servers, prompts, native)
    fleet.stop()


def exact(case: Case) -> bool:
    """Whether tokens are the same however requests are batched; in 16 bits they need not be."""
    return dtype_of(case.kind) == "float32"


def assert_tie(trio: Trio, place: int, tokens: tuple[int, ...]) -> None:
    """Where an answer leaves the native one, its token is the best of the same context, or as good.

    So it is what native gives too where it computes that context anew, as it must after preemption.
    """
    native = trio.native[place]
    at = next(k for k, pair in enumerate(zip(native, tokens, strict=True)) if len(set(pair)) > 1)
    post(trio.servers[0].url, "/reset_prefix_cache")
    best = likeliest(trio.servers[0], [*trio.prompts[place], *native[:at]])
    print(f"prompt {place} differs at token {at}: {native[at]}, {tokens[at]}; likeliest are {best}")
    # One step of bfloat16 between 16 and 32, where the logits of these models are.
    assert best[tokens[at]] >= max(best.values()) - 0.126


def test_tokens_are_native_under_a_budget_that_forces_preemption(trio: Trio) -> None:
    with Sampler(trio.fleet) as sampler:
        rounds = [ask_together(trio.servers, trio.prompts, trio.case.max_tokens) for _ in range(2)]
    given = [tokens_of(of_server) for answers in rounds for of_server in answers]
    if exact(trio.case):
        assert all(tokens == trio.native for tokens in given)
    else:
        different = {
            (i, tokens[i])
            for tokens in given
            for i in range(len(trio.prompts))
            if tokens[i] != trio.native[i]
        }
        assert len(different) <= 4
        for i, tokens in sorted(different):
            assert_tie(trio, i, tokens)
    assert_within_budget(sampler.samples)
    preemptions = [metric(s.url, "vllm:num_preemptions_total") for s in trio.servers]
    print(f"preemptions: {preemptions}")
    assert sum(preemptions) > 0


def test_tokens_depend_on_every_group_of_the_cache(trio: Trio) -> None:
    server = trio.servers[0]
    (prompt,) = prompts_of(11, 1, 300, 300)
    groups = rpc(server, "probe_groups")
    (clean,) = tokens_of(ask(server, [prompt], 400))
    for group, kind in enumerate(groups["kinds"]):
        post(server.url, "/reset_prefix_cache")
        asking = Asking(server, [prompt], 400)
        found = {"block": 0, "tokens": 0}
        while asking.running and not found["block"]:
            found = rpc(server, "probe_corrupt", str(group))
        (wrong,) = tokens_of(asking.join())
        assert found["block"], f"the request ended before its {kind} block could be corrupted"
        before = max(0, found["tokens"] - len(prompt))
        assert wrong[:before] == clean[:before]
        assert wrong != clean, f"tokens do not depend on the {kind} of group {group}"
    # What was made wrong must not be found by anybody.
    post(server.url, "/reset_prefix_cache")
    assert tokens_of(ask(server, [prompt], 400)) == [clean]
