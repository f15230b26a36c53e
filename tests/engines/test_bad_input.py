"""Bad input: one clear error that says what was found and what to do, before memory is taken."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fleet import PROBE, Fleet, ask, prompts_of, tokens_of, until

from kvtide.ledger import DeviceSpec, Ledger
from kvtide.ledger import layout as words
from kvtide.ledger.lease import take_lease
from kvtide.units import MIB, parse_size
from kvtide.verify.models import ensure_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

DEVICE_BYTES = 64 * MIB
LENGTH = 2048
ARGUMENTS = ("--block-size", "32", "--max-model-len", str(LENGTH))
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def check_refusal(status: int, output: str, expected_status: int, *said: str) -> str:
    """One error of kvtide, with all that is expected in it, and no traceback; the error."""
    assert "Traceback" not in output, output
    (error,) = [line for line in output.splitlines() if "kvtide: " in line and "INFO" not in line]
    for part in said:
        assert re.search(part, error), f"{part!r} is not in {error!r}"
    assert status == expected_status, output
    return error


# Servers ------------------------------------------------------------------------------------------


def refused_server(
    fleet: Fleet, expected_status: int, *said: str, arguments: tuple[str, ...] = (), **environ: str
) -> str:
    """Start a server that must be refused; its error."""
    server = fleet.start("llama-wide", "x", *ARGUMENTS, *arguments, environ=environ, probe=False)
    until(lambda: server.exit_status() is not None, 240, "the server ends")
    until(lambda: not server.pids(), 60, "and all its processes")
    assert fleet.held_bytes() == 0
    status = server.exit_status()
    assert status is not None
    return check_refusal(status, server.log.read_text(), expected_status, *said)


def test_a_server_with_a_bad_setting(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(DEVICE_BYTES)
    refused_server(fleet, 2, "KVTIDE_LIMIT='lots' is not accepted", "12GiB", KVTIDE_LIMIT="lots")
    assert not fleet.ledgers.exists()


def test_a_server_with_a_kv_connector(make_fleet: Callable[[int], Fleet]) -> None:
    arguments = ("--kv-transfer-config", json.dumps(CONNECTOR))
    refused_server(
        make_fleet(DEVICE_BYTES), 1, "KV connector 'ExampleConnector'", "supported is",
        arguments=arguments,
    )  # fmt: skip


@pytest.mark.parametrize("limited", ["KVTIDE_BUDGET", "KVTIDE_LIMIT"])
def test_a_budget_too_small_for_one_longest_request(
    make_fleet: Callable[[int], Fleet], limited: str
) -> None:
    # 64 blocks and the null block, in four parts: one granule more than 32 MiB in each.
    fleet = make_fleet(DEVICE_BYTES)
    error = refused_server(
        fleet, 1, f"one request of {LENGTH} tokens", limited, **{limited: "32MiB"}
    )
    (smallest,) = re.findall(r"make it at least (\w+),", error)
    assert smallest == "40MiB"
    server = fleet.start("llama-wide", "y", *ARGUMENTS, environ={limited: smallest}).wait_ready()
    tokens_of(ask(server, prompts_of(43, 1, LENGTH - 8, LENGTH - 8), 8))
    assert fleet.charge("y") == parse_size(smallest)
    server.stop()


def test_a_device_too_small_for_one_longest_request(make_fleet: Callable[[int], Fleet]) -> None:
    error = refused_server(
        make_fleet(2 * MIB), 1, f"one request of {LENGTH} tokens", "KVTIDE_HOST_MEMORY"
    )
    (smallest,) = re.findall(r"make the latter at least (\w+)", error)
    fleet = make_fleet(parse_size(smallest))
    server = fleet.start("llama-wide", "y", *ARGUMENTS).wait_ready()
    tokens_of(ask(server, prompts_of(43, 1, LENGTH - 8, LENGTH - 8), 8))
    server.stop()
    just_less = make_fleet(parse_size(smallest) - 2 * MIB)
    refused_server(just_less, 1, f"make the latter at least {smallest}")


# Settings alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KVTIDE": "yes"}, r"KVTIDE='yes' is not accepted: write 1 for on or 0 for off"),
        ({"KVTIDE_BUDGET": "12 parsecs"}, r"KVTIDE_BUDGET='12 parsecs' .* 12GiB"),
        ({"KVTIDE_MARGIN": "-1MiB"}, r"KVTIDE_MARGIN='-1MiB' is not accepted"),
        ({"KVTIDE_HOST_MEMORY": "1e9"}, r"KVTIDE_HOST_MEMORY='1e9' is not accepted"),
        ({"KVTIDE_HOST_DEVICE": "a/b"}, r"KVTIDE_HOST_DEVICE='a/b' .* plain name"),
        ({"KVTIDE_NAME": "a b"}, r"KVTIDE_NAME='a b' is not accepted"),
        ({"KVTIDE_DIR": "ledgers"}, r"KVTIDE_DIR='ledgers' must be an absolute path"),
        ({"KVTIDE_WAIT_DEADLINE": "soon"}, r"KVTIDE_WAIT_DEADLINE='soon' .* seconds"),
        ({"KVTIDE_LIMITS": "1GiB"}, r"KVTIDE_LIMITS is not a setting of kvtide; there are .*LIMIT"),
        (
            {"KVTIDE_LIMIT": "2GiB", "KVTIDE_BUDGET": "1GiB"},
            r"KVTIDE_LIMIT=2GiB is above KVTIDE_BUDGET=1GiB: lower the one or raise the other",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_setting_ends_the_process_that_activates(environ: dict[str, str], said: str) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVTIDE")}
    ended = subprocess.run(
        [sys.executable, "-c", "from kvtide.activate import vllm; vllm()"],
        env=inherited | {"KVTIDE": "1"} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    check_refusal(ended.returncode, ended.stdout + ended.stderr, 2, said)


# What the outermost process finds when the configuration is made ----------------------------------


def spec(fleet: Fleet, **different: Any) -> DeviceSpec:
    """The device of a fleet as its ledger has it."""
    values = {
        "uuid": fleet.uuid,
        "backend": "host",
        "name": "host memory",
        "total_bytes": fleet.size_bytes,
        "margin_bytes": 0,
        "budget_cap_bytes": None,
        "granularity_bytes": 2 * MIB,
    }
    return DeviceSpec(**(values | different))


@contextmanager
def live_ledger(fleet: Fleet, **different: Any) -> Iterator[Path]:
    """A ledger by which this process lives, under the name `taken`."""
    ledger = Ledger.open(fleet.ledgers, spec(fleet, **different))
    instance = ledger.register("taken", explicit=True)
    yield ledger.path
    instance.close()
    ledger.close()


@contextmanager
def live_file(fleet: Fleet, content: bytes) -> Iterator[None]:
    """Some file in the ledger's place, with a lease on it."""
    fleet.ledgers.mkdir(mode=0o700)
    path = fleet.ledgers / f"{fleet.uuid}.ledger"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    assert take_lease(descriptor, 4096)
    yield
    os.close(descriptor)


def other_layout(fleet: Fleet) -> bytes:
    """A ledger's file that a version to come might have written."""
    ledger = Ledger.open(fleet.ledgers, spec(fleet))
    ledger.close()
    content = bytearray(ledger.path.read_bytes())
    memoryview(content).cast("q")[words.H_LAYOUT] = words.LAYOUT + 1
    ledger.path.unlink()
    fleet.ledgers.rmdir()
    return bytes(content)


@pytest.fixture(scope="module")
def outcomes(
    make_fleet: Callable[[int], Fleet], models: Path
) -> Iterator[dict[str, dict[str, Any]]]:
    """What became of each case, by its name."""
    model = str(ensure_model("llama-wide", models))
    cases = {}
    with ExitStack() as stack:

        def case(
            name: str, *arguments: str, fleet: Fleet | None = None, broken: str = "", **environ: str
        ) -> Fleet:
            fleet = fleet or make_fleet(DEVICE_BYTES)
            cases[name] = {
                "environ": fleet.environ | environ,
                "arguments": ["--model", model, *ARGUMENTS, *arguments],
                "broken": broken.split(),
            }
            return fleet

        case("nothing wrong")
        case("sleep mode", "--enable-sleep-mode", broken="platform")
        case("connector", "--kv-transfer-config", json.dumps(CONNECTOR))
        case("worker", "--worker-cls", "some.Worker")
        case("scheduler", "--scheduler-cls", "some.Scheduler")
        case("vllm", broken="vllm")
        case("memfd", broken="memfd")
        case("no granule", KVTIDE_HOST_MEMORY="1MiB")
        case("owner", broken="user").ledgers.mkdir(mode=0o700)
        case("directory").ledgers.mkdir()
        cases["directory"]["environ"]["KVTIDE_DIR"] = str(_open_directory(make_fleet(DEVICE_BYTES)))
        fleet = case("name", KVTIDE_NAME="taken")
        stack.enter_context(live_ledger(fleet))
        case("total", fleet=fleet, KVTIDE_HOST_MEMORY="1GiB")
        case("margin", fleet=fleet, KVTIDE_MARGIN="4MiB")
        case("budget", fleet=fleet, KVTIDE_BUDGET="32MiB")
        fleet = case("layout")
        stack.enter_context(live_file(fleet, other_layout(fleet)))
        fleet = case("cut short")
        stack.enter_context(live_file(fleet, b"short"))
        ended = subprocess.run(
            [sys.executable, str(PROBE / "refusals.py")],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        )
        yield json.loads(ended.stdout.splitlines()[-1])


def _open_directory(fleet: Fleet) -> Path:
    fleet.ledgers.mkdir()
    fleet.ledgers.chmod(0o777)
    return fleet.ledgers


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sleep mode", ("--enable-sleep-mode", "start without the flag")),
        ("connector", ("KV connector 'ExampleConnector'", "supported is vLLM without")),
        ("worker", ("worker class some.Worker", "KVTIDE=0")),
        ("scheduler", ("scheduler class 'some.Scheduler'", "KVTIDE=0")),
        ("vllm", ("vLLM .* describes its KV cache by", "are known")),
        ("memfd", ("memfd_create", "Linux 3.17 or newer")),
        ("no granule", ("1MiB holds no memory", "KVTIDE_HOST_MEMORY")),
        ("owner", ("belongs to user", "set KVTIDE_DIR")),
        ("directory", ("is open to others", "chmod 700")),
        ("name", ("taken", str(os.getpid()))),
        ("total", ("its total is 64MiB, here it is 1GiB",)),
        ("margin", (r"its margin \(KVTIDE_MARGIN\) is 0B, here it is 4MiB",)),
        ("budget", (r"its cap \(KVTIDE_BUDGET\) is none, here it is 32MiB",)),
        ("layout", ("its layout is version", "this kvtide knows")),
        ("cut short", ("it is cut short",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_start_is_refused(
    outcomes: dict[str, dict[str, Any]], name: str, said: tuple[str, ...]
) -> None:
    outcome = outcomes[name]
    check_refusal(outcome["status"], outcome["output"], 1, *said)


def test_the_same_start_without_anything_wrong_is_not(outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes["nothing wrong"]["status"] == 77, outcomes["nothing wrong"]["output"]
