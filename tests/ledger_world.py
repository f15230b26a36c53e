"""Small ledgers for tests, and other processes that take part in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvtide.ledger import DeviceSpec, Ledger
from kvtide.units import MIB

TOTAL = 256 * MIB


def spec(**changes: object) -> DeviceSpec:
    fields: dict[str, object] = {
        "uuid": "host",
        "backend": "host",
        "name": "a device of tests",
        "total_bytes": TOTAL,
        "margin_bytes": 0,
        "budget_cap_bytes": None,
        "granularity_bytes": 2 * MIB,
    }
    return DeviceSpec(**(fields | changes))  # type: ignore[arg-type]


def enroll(ledger: Ledger, name: str, sampler: Callable[[], int] = lambda: TOTAL, **limit: int):
    """An instance with one pool, both held by this process."""
    instance = ledger.register(name, explicit=False, **limit)
    account = ledger.enroll(
        instance, pool_name="kv", rank=0, blocks_total=64, block_bytes=2 * MIB, sampler=sampler
    )
    return instance, account


def until(true: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


_MEMBER = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
from ledger_world import enroll, spec
from kvtide.ledger import Ledger
from kvtide.units import MIB
ledger = Ledger.open(Path({directory!r}), spec())
{body}
print("ready", flush=True)
sys.stdin.readline()
"""


class Member:
    """A process that opens the ledger of a directory, runs `body`, and then waits to be ended."""

    def __init__(self, directory: Path, body: str) -> None:
        here = str(Path(__file__).parent)
        code = _MEMBER.format(tests=here, directory=str(directory), body=body)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        assert self.said, "the member failed to start"
        if self.said != "ready":
            assert self.process.stdout.readline().strip() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(10)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.close()
