"""Deaths, idleness and negative controls: what is left of a server, and what others get of it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from fleet import Asking, Fleet, ask, processes, prompts_of, rpc, tokens_of, until

from kvtide.device.census import holdings
from kvtide.units import MIB
from kvtide.verify.client import post
from kvtide.verify.servers import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

DEVICE_BYTES = 64 * MIB
# Of llama-wide: one a layer.
KV_TENSORS = 4
# All its blocks; and what the null block lies in.
MOST_BYTES = 60 * MIB
LEAST_BYTES = KV_TENSORS * 2 * MIB
ARGUMENTS = ("--block-size", "32", "--max-model-len", "2048")
# As the kernel cuts process names.
ROLES = {"API server": None, "EngineCore": "EngineCor", "worker": "Worker"}
DEFAULT_NAME = "vllm-m"


class Neighbour(NamedTuple):
    """A server that nobody kills, and what it answers."""

    fleet: Fleet
    server: Server
    prompts: list[list[int]]
    tokens: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def neighbour(make_fleet: Callable[[int], Fleet]) -> Iterator[Neighbour]:
    """It keeps no prefix cache."""
    fleet = make_fleet(DEVICE_BYTES)
    server = fleet.start("llama-wide", "b", *ARGUMENTS, "--no-enable-prefix-caching").wait_ready()
    prompts = prompts_of(31, 24, 200, 400)
    yield Neighbour(fleet, server, prompts, tokens_of(ask(server, prompts, 96)))
    fleet.stop()


def test_idle_without_prefix_caching_almost_nothing_remains(neighbour: Neighbour) -> None:
    fleet = neighbour.fleet
    assert tokens_of(ask(neighbour.server, neighbour.prompts, 96)) == neighbour.tokens
    until(lambda: fleet.charge("b") <= KV_TENSORS * 4 * MIB, 120, "an idle engine gives back")
    until(lambda: fleet.held_bytes() == fleet.charge("b"), 60, "the kernel says so too")


@pytest.mark.timed
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "loaded"])
@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_takes_its_server_along(
    neighbour: Neighbour, role: str, loaded: bool
) -> None:
    fleet, server = neighbour.fleet, neighbour.server
    # Every victim is the restart of the one before, and has its name, which nobody gave it.
    victim = fleet.start(
        "llama-wide", "victim", *ARGUMENTS, environ={"KVTIDE_NAME": ""}
    ).wait_ready()
    assert {i.name for i in fleet.snapshot().instances} == {"b", DEFAULT_NAME}
    mine = prompts_of(37, 16, 200, 400)
    going = []
    if loaded:
        going = [Asking(victim, mine, 1000), Asking(server, neighbour.prompts * 4, 96)]
        until(
            lambda: fleet.charge(DEFAULT_NAME) > LEAST_BYTES and fleet.charge("b") > LEAST_BYTES,
            30,
            "both servers are at work",
        )
    else:
        tokens_of(ask(victim, mine, 32))
        assert fleet.charge(DEFAULT_NAME) > DEVICE_BYTES // 2
    name = ROLES[role]
    pid = victim.pid if name is None else victim.role_pid(name)

    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    until(
        lambda: not victim.pids(),
        1,
        f"no process is left when the {role} dies",
        lambda: processes(victim.pids()),
    )
    left = set(server.pids())
    until(lambda: {h.pid for h in holdings(fleet.uuid)} <= left, 1, "its memory is gone")
    if not loaded:
        going = [Asking(server, neighbour.prompts, 96)]
        killed = time.monotonic()
    until(lambda: fleet.charge("b") == MOST_BYTES, 1, "the neighbour has all the memory")
    print(f"after {time.monotonic() - killed:.3f} s")
    tokens = tokens_of(going[-1].join())
    assert tokens == neighbour.tokens * (len(tokens) // len(neighbour.tokens))
    if loaded:
        assert any(answer.error for answer in going[0].join())
    assert fleet.instance(DEFAULT_NAME) is None
    victim.stop()
    assert victim.exit_status() != 0


def test_a_worker_that_does_not_map_crashes_at_once(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(DEVICE_BYTES)
    server = fleet.start("llama-wide", "liar", *ARGUMENTS).wait_ready()
    rpc(server, "probe_stop_mapping")
    (answer,) = ask(server, prompts_of(41, 1, 400, 400), 8)
    assert answer.error is not None
    until(lambda: not server.pids(), 60, "the server is gone")
    server.stop()
    assert server.exit_status() == 1
    assert "ended unexpectedly" in server.log.read_text()


def test_without_kvtide_nothing_of_it_is_there(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(DEVICE_BYTES)
    looks = []
    for name, plugins in (("off", None), ("absent", "process_probe")):
        found = fleet.directory / name
        found.mkdir()
        environ = {"PROBE_DIR": str(found)}
        if plugins is not None:
            # vLLM then loads no other plugin, and kvtide's entry point is not there.
            environ["VLLM_PLUGINS"] = plugins
        server = fleet.start("llama-wide", None, *ARGUMENTS, environ=environ, probe=True)
        server.wait_ready()
        (found / "look").touch()
        until(lambda f=found: len(list(f.glob("*.json"))) == 3, 120, "three processes have looked")
        post(server.url, "/reset_prefix_cache")
        server.stop()
        looks.append([json.loads(path.read_text()) for path in sorted(found.glob("*.json"))])
    off, absent = looks
    for look in off:
        assert set(look.pop("kvtide_modules")) <= {"kvtide", "kvtide.activate"}
    for look in absent:
        assert look.pop("kvtide_modules") == []
    assert off == absent
    assert not fleet.ledgers.exists()
