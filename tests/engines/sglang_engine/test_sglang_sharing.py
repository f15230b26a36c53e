"""SGLang servers on one device: pressure, one capacity, deaths, and neighbours of other kinds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet import Sampler, prompts_of, tokens_of, until

from kvtide.device.census import used_bytes
from kvtide.ledger import Ledger
from kvtide.units import MIB
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="needs SGLang"),
]

KIND = "llama-wide"
PROMPTS, TOKENS = 24, 96
READY_SECONDS = 800
# Liveness only.
WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(11, PROMPTS, 100, 400)


@pytest.fixture(scope="module")
def native(
    prompts: list[list[int]], sglang_fleet: Callable[[int], object]
) -> list[tuple[int, ...]]:
    fleet = sglang_fleet(64 * MIB)
    plain = ("--max-total-tokens", "20000", "--mem-fraction-static", "0.5")
    server = fleet.start(KIND, None, *plain).wait_ready(READY_SECONDS)
    tokens = tokens_of(server.ask(prompts, TOKENS))
    native_cached.extend(cached_twice(server, prompts[:6]))
    server.stop()
    return tokens


native_cached: list[int | None] = []


def cached_twice(server, prompts) -> list[int | None]:
    """How much of these prompts, asked one by one, is found in an empty cache, and again."""
    server.drop_cache()
    return [
        server.ask([prompt], 8)[0].cached_tokens
        for prompt in [*prompts, *prompts, *(p + prompts[0][:50] for p in prompts)]
    ]


@pytest.fixture(scope="module")
def two(sglang_fleet: Callable[[int], object]) -> Iterator[tuple]:
    fleet = sglang_fleet(96 * MIB)
    servers = [fleet.start(KIND, name, "--mem-fraction-static", "0.9") for name in ("a", "b")]
    for server in servers:
        server.wait_ready(READY_SECONDS)
    yield fleet, servers
    fleet.stop()


def assert_within_device(samples) -> None:
    """Neither the charges nor what the kernel counts were ever more than the device lends."""
    assert samples
    for sample in samples:
        assert sample.charged_bytes <= sample.ceiling_bytes, sample
        assert sample.held_bytes <= sample.ceiling_bytes, sample


def capacity_of(server) -> int:
    (found,) = re.findall(r"max_total_num_tokens=(\d+)", server.log.read_text())
    return int(found)


def retractions_of(server) -> int:
    return sum(
        int(n)
        for n in re.findall(r"#retracted_reqs: (\d+)", server.log.read_text(errors="replace"))
    )


def gifts_of(server) -> int:
    return len(re.findall("gives back .* that others wish for", server.log.read_text()))


def ask_both(servers, prompts, tokens):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(servers)) as pool:
        jobs = [pool.submit(server.ask, prompts, tokens) for server in servers]
        return [job.result() for job in jobs]


VLLM = os.environ.get("KV_VLLM_PYTHON", "")


@pytest.mark.skipif(not Path(VLLM).is_file(), reason="KV_VLLM_PYTHON names no interpreter")
def test_memory_moves_both_ways_between_vllm_and_sglang(
    sglang_fleet, models, prompts, native
) -> None:
    fleet = sglang_fleet(96 * MIB)
    ours = fleet.start(KIND, "s", "--mem-fraction-static", "0.9")
    theirs = Server(
        ensure_model(KIND, models),
        log=fleet.directory / "v.log",
        arguments=[
            *("--dtype", dtype_of(KIND), "--served-model-name", "m", "--max-model-len", "2048"),
            *("--block-size", "32"),
        ],
        environ=fleet.environ | {"KVTIDE_NAME": "v"},
        python=VLLM,
    )
    fleet._started.append(theirs)
    theirs.start()
    ours.wait_ready(READY_SECONDS)
    theirs.wait_ready(READY_SECONDS)
    # Both engines generate the same tokens of the same weights, natively too.
    peaks = {}
    with Sampler(fleet) as sampler:
        for _ in range(2):
            assert tokens_of(ours.ask(prompts, TOKENS)) == native
            peaks["s"] = sampler.peak("s")
            theirs_now = tokens_of(theirs.ask(prompts, TOKENS))
            assert len(theirs_now) == len(native)
            peaks["v"] = sampler.peak("v")
    assert_within_device(sampler.samples)
    print(json.dumps({name: peak >> 20 for name, peak in peaks.items()}))
    # Together they held more than there is: what the one had was the other's before.
    assert sum(peaks.values()) > fleet.size_bytes
    assert {i.name for i in fleet.snapshot().instances} == {"s", "v"}
    fleet.stop()


def test_a_starved_rank_holds_all_ranks_back_and_they_stay_in_step(
    sglang_fleet, prompts, native, monkeypatch
) -> None:
    fleet = sglang_fleet(64 * MIB)
    devices = f"{fleet.uuid}-0,{fleet.uuid}-1"
    server = fleet.start(
        KIND,
        "tp",
        *("--mem-fraction-static", "0.9", "--tp-size", "2"),
        environ={"KVTIDE_HOST_DEVICE": devices, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ).wait_ready(READY_SECONDS)
    names = devices.split(",")
    from fleet import Ballast

    class Place:
        uuid, size_bytes = names[1], fleet.size_bytes

    ballast = Ballast(Place(), 1)
    assert tokens_of(server.ask(prompts[:6], TOKENS)) == native[:6]
    server.drop_cache()
    # The second rank's device has room for one more column of extents: the first one's is empty.
    free = fleet.size_bytes - used_bytes(names[1])
    ballast.hold(max(0, free - 24 * MIB))
    time.sleep(1.1)
    answers = server.ask(prompts, TOKENS)
    assert tokens_of(answers) == native
    lines = [json.loads(line) for line in server.rounds.read_text().splitlines()]
    of_rank = [[{**line, "rank": 0} for line in lines if line["rank"] == rank] for rank in (0, 1)]
    assert of_rank[0] == of_rank[1]
    assert len(of_rank[0]) > 100
    print(f"{len(of_rank[0])} rounds in step, {retractions_of(server)} retractions")
    held = [used_bytes(name) for name in names]
    assert held[0] <= held[1]
    ballast.close()
    server.stop()
    assert [used_bytes(name) for name in names] == [0, 0]


def test_prompts_that_cannot_be_backed_after_all_wait(sglang_fleet, prompts, native) -> None:
    """Allocations that were counted on fail: whole prompts, and chunks of one that is kept."""
    fleet = sglang_fleet(96 * MIB)
    server = fleet.start(
        KIND,
        "f",
        *("--mem-fraction-static", "0.9", "--chunked-prefill-size", "128"),
        *("--max-total-tokens", "9000"),
        environ={
            "FAULT_PROMPTS": ",".join(str(40 + n) for n in (2, 3, 5, 8, 9, 10, 14, 20, 27, 28)),
            "FAULT_LATER": "6",
        },
    ).wait_ready(READY_SECONDS)
    # Alone and taken up in part, it goes back to the queue and comes again by itself.
    (long,) = prompts_of(23, 1, 900, 900)
    (first,) = server.ask([long], 16)
    assert "taken up in part waits" in server.log.read_text()
    server.drop_cache()
    (again,) = server.ask([long], 16)
    assert tokens_of([first]) == tokens_of([again])
    assert first.cached_tokens == again.cached_tokens == 0
    server.drop_cache()
    assert tokens_of(server.ask(prompts, TOKENS)) == native
    # The number that was given wins, though it is more than the device may ever hold.
    assert capacity_of(server) == 9000
    log = server.log.read_text()
    # Said once of those in a row.
    assert 5 <= log.count("prompts wait, there is no memory for them") <= 10
    # Found in the cache as if nothing had happened, and no slot is lost.
    for _ in range(2):
        again = server.ask(prompts[:4], TOKENS)
        assert tokens_of(again) == native[:4]
    assert all(a.cached_tokens for a in again)
    server.drop_cache()
    assert "memory leak" not in server.log.read_text()
    assert server.healthy()
    fleet.stop()


# From here on two servers stay for all tests; those above have the machine for themselves.


def test_both_have_the_same_capacity(two) -> None:
    fleet, servers = two
    sizes = [capacity_of(server) for server in servers]
    # 0.9 of the device, in tokens of 16 KiB: nobody looked at what was free.
    assert sizes == [int(0.9 * fleet.size_bytes) // (16 << 10)] * 2


def test_tokens_are_native_under_pressure(two, prompts, native) -> None:
    fleet, servers = two
    gifts = retracted = rounds = 0
    with Sampler(fleet) as sampler:
        # As often as it takes to see enough of it.
        while rounds < 8 and (rounds == 0 or gifts < 20 or retracted < 10):
            for answers in ask_both(servers, prompts, TOKENS):
                assert tokens_of(answers) == native
            # Alternately one of them, so that its neighbour's cache is what there is to have.
            for server in servers:
                assert tokens_of(server.ask(prompts[:12], TOKENS)) == native[:12]
            rounds += 1
            gifts = sum(map(gifts_of, servers))
            retracted = sum(map(retractions_of, servers))
    assert_within_device(sampler.samples)
    print(f"{rounds} rounds: {gifts} gifts to the other, {retracted} retractions")
    assert gifts >= 20
    assert retracted >= 10
    for name in ("a", "b"):
        assert sampler.peak(name) > fleet.size_bytes // 2


def test_cached_tokens_are_native_after_pressure(two, prompts, native) -> None:
    _, servers = two
    for server in servers:
        # An engine wishes for what its requests need, and gives up its own cache before: beside one
        # whose cache fills the device, it might keep too little to find these prompts again.
        for each in servers:
            each.drop_cache()
        assert cached_twice(server, prompts[:6]) == native_cached
    assert max(native_cached) > 100


def test_an_idle_neighbours_cache_is_lent_and_comes_back(two, prompts, native) -> None:
    fleet, servers = two
    for lender, borrower, name in (
        (servers[0], servers[1], "a"),
        (servers[1], servers[0], "b"),
    ):
        lender.ask(prompts[:12], 8)
        until(
            lambda name=name: fleet.instance(name).state.name == "SLEEPING",
            WAIT_SECONDS,
            "it idles",
        )
        before = fleet.charge(name)
        assert tokens_of(borrower.ask(prompts, TOKENS)) == native
        assert fleet.charge(name) < before


ROLES = {"scheduler": "scheduler", "detokenizer": "detokenizer", "outermost": "launch_server"}


@pytest.mark.parametrize("role", ROLES)
def test_killed_with_nine_its_memory_is_free(two, prompts, native, role: str) -> None:
    fleet, servers = two
    victim = living(fleet, servers)
    kill(fleet, victim, prompts, role)
    assert tokens_of(servers[1].ask(prompts, TOKENS)) == native
    # Where b lacked nothing nobody has looked yet: the next engine that starts does so.
    (path,) = Ledger.existing(fleet.ledgers)
    ledger = Ledger.attach(path)
    ledger.retire_dead()
    ledger.close()
    until(lambda: fleet.instance("a") is None, WAIT_SECONDS, "its record is gone")
    until(lambda: fleet.held_bytes() == fleet.charge("b"), WAIT_SECONDS, "its memory is free")


@pytest.mark.timed
def test_killed_with_nine_all_of_it_is_gone_within_seconds(two, prompts) -> None:
    fleet, servers = two
    took = kill(fleet, living(fleet, servers), prompts, "scheduler")
    print(f"all processes gone after {took:.2f} s")
    assert took < 5


def living(fleet, servers):
    """The first server, or another in its place where it was killed before."""
    if servers[0].exit_status() is not None:
        servers[0] = fleet.start(KIND, "a", "--mem-fraction-static", "0.9")
        servers[0].wait_ready(READY_SECONDS)
        # Beside a neighbour that holds what it has cached, as it was beside an empty one.
        assert capacity_of(servers[0]) == capacity_of(servers[1])
    return servers[0]


def kill(fleet, server, prompts, role: str) -> float:
    """End one of a server's processes by force; how long the others took to follow."""
    server.ask(prompts[:8], 8)
    until(lambda: fleet.charge("a") > 16 * MIB, WAIT_SECONDS, "it holds memory")
    chosen = next(p for p in server.pids() if ROLES[role] in name_of(p))
    os.kill(chosen, signal.SIGKILL)

    def gone() -> bool:
        server.exit_status()  # reaps it, so that it leaves the session
        return not server.pids()

    return until(gone, WAIT_SECONDS, "all of its processes are gone")


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
