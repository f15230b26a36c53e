"""Engines of several ranks: native tokens, ranks in step, and nothing left when one dies."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from fleet import (
    Asking,
    Ballast,
    Fleet,
    Sampler,
    ask,
    ask_together,
    prompts_of,
    tokens_of,
    until,
)

from kvtide.device.census import used_bytes
from kvtide.ledger import Ledger, Snapshot
from kvtide.units import MIB
from kvtide.verify.client import metric
from kvtide.verify.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

BLOCKS = ("--max-model-len", "2048", "--block-size", "32")
_HELPER = "resource_tracker"
SPLIT = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


class Parallel(NamedTuple):
    """How an engine is cut into two ranks."""

    name: str
    arguments: tuple[str, ...]


TENSOR = Parallel("tp", ("--tensor-parallel-size", "2"))
PIPELINE = Parallel("pp", ("--pipeline-parallel-size", "2", "--no-enforce-eager"))


class DeviceForEachRank(Fleet):
    """A fleet whose ranks take two host devices in turn."""

    def __init__(self, directory: Path, models: Path, size_bytes: int) -> None:
        super().__init__(directory, models, size_bytes)
        self.uuids = (f"{self.uuid}-0", f"{self.uuid}-1")

    @property
    def environ(self) -> dict[str, str]:
        return super().environ | {"KVTIDE_HOST_DEVICE": ",".join(self.uuids)}

    def snapshots(self) -> list[Snapshot]:
        """Of both devices' ledgers."""
        found = []
        for path in Ledger.existing(self.ledgers):
            with Ledger.read(path) as observer:
                found.append(observer.snapshot())
        return found


def start(fleet: Fleet, name: str | None, parallel: Parallel) -> Server:
    return fleet.start("llama-wide", name, *BLOCKS, *parallel.arguments, environ=SPLIT, probe=False)


def _is_gone(server: Server) -> bool:
    return not server.pids()


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except FileNotFoundError:
        return "gone"


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=lambda p: p.name)
def test_tokens_are_native_under_pressure(
    parallel: Parallel, make_fleet: Callable[[int], Fleet]
) -> None:
    fleet = make_fleet(128 * MIB)
    prompts = prompts_of(7, 24, 100, 400)
    reference = start(fleet, None, parallel).wait_ready()
    native = tokens_of(ask(reference, prompts, 96))
    reference.stop()
    servers = [start(fleet, name, parallel) for name in ("a", "b")]
    for server in servers:
        server.wait_ready()
    with Sampler(fleet) as sampler:
        for answers in ask_together(servers, prompts, 96):
            assert tokens_of(answers) == native
    # A sample of the budget during a release lowers it for a moment: not below is what is there.
    for sample in sampler.samples:
        assert max(sample.charged_bytes, sample.held_bytes) <= fleet.size_bytes, sample
    preemptions = [metric(s.url, "vllm:num_preemptions_total") for s in servers]
    print(f"preemptions: {preemptions}")
    assert sum(preemptions) > 0
    for name in ("a", "b"):
        instance = fleet.instance(name)
        assert instance is not None
        assert len(instance.pools) == 2
        if parallel is TENSOR:
            first, second = instance.pools
            assert first.charge_bytes == second.charge_bytes
    fleet.stop()


@pytest.fixture
def two_devices(tmp_path: Path, models: Path) -> Iterator[DeviceForEachRank]:
    fleet = DeviceForEachRank(tmp_path, models, 64 * MIB)
    yield fleet
    fleet.stop()
    assert [used_bytes(uuid) for uuid in fleet.uuids] == [0, 0]


def test_ranks_stay_in_step_when_one_device_is_starved(two_devices: DeviceForEachRank) -> None:
    fleet = two_devices
    prompts = prompts_of(7, 16, 100, 400)
    reference = start(fleet, None, TENSOR).wait_ready()
    native = tokens_of(ask(reference, prompts, 96))
    reference.stop()
    server = start(fleet, "a", TENSOR).wait_ready()
    # Nobody asks it: two thirds of rank 1's device are somebody else's now, and rank 0 has room.
    fleet.uuid = fleet.uuids[1]
    ballast = Ballast(fleet, 44 * MIB)
    try:
        assert tokens_of(ask(server, prompts, 96)) == native
        charges = {
            s.spec.uuid: sum(i.charged_bytes for i in s.instances) for s in fleet.snapshots()
        }
        print(f"charges beside the ballast: {charges}")
        assert charges[fleet.uuids[0]] == charges[fleet.uuids[1]] <= 20 * MIB
        ballast.hold(0)
        assert tokens_of(ask(server, prompts, 96)) == native
    finally:
        ballast.close()
    assert server.healthy()


@pytest.mark.timed
def test_a_server_that_loses_any_process_is_gone_and_its_neighbour_has_the_memory(
    make_fleet: Callable[[int], Fleet],
) -> None:
    fleet = make_fleet(128 * MIB)
    seed = int(os.environ.get("KV_TEST_SEED", "5"))
    dice = random.Random(seed)
    print(f"seed {seed}")
    prompts = prompts_of(seed, 24, 100, 400)
    neighbour = fleet.start("llama-wide", "b", *BLOCKS, probe=False)
    victim = start(fleet, "a", TENSOR).wait_ready()
    neighbour.wait_ready()
    # On a machine that is busy with other things processes may take longer to be scheduled.
    bound = float(os.environ.get("KV_TEST_GONE_SECONDS", "1"))
    times = int(os.environ.get("KV_TEST_KILLS", "4"))
    for number in range(times):
        load = Asking(victim, prompts, 200)
        beside = Asking(neighbour, prompts, 60)
        # Python's own helper outlives the others by design: it removes what they have left.
        pids = [p for p in victim.pids() if _HELPER not in _name_of(p)]
        time.sleep(dice.uniform(0.5, 5.0))
        # Each process at least once in as many kills as there are processes, the outermost last.
        pid = pids[(number + 1) % len(pids)]
        name = _name_of(pid)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        time.sleep(max(0.0, min(bound, 1.0) + killed - time.monotonic()))
        left = [n for n in map(_name_of, victim.pids()) if _HELPER not in n]
        until(partial(_is_gone, victim), 60, f"all of the server gone after {name} ({pid})")
        gone = time.monotonic() - killed
        # Whoever needs memory retires what the dead had; here it is the test.
        (path,) = Ledger.existing(fleet.ledgers)
        ledger = Ledger.attach(path)
        ledger.retire_dead()
        ledger.close()
        assert fleet.charge("a") == 0
        print(f"{name}: left after 1 s: {left}; all gone after {gone:.3f} s", flush=True)
        assert not left or gone <= bound
        load.join()
        assert all(answer.error is None for answer in beside.join())
        assert fleet.held_bytes() <= fleet.charge("b")
        if number + 1 < times:
            victim = start(fleet, "a", TENSOR).wait_ready()
    assert neighbour.healthy()
