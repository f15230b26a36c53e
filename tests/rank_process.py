"""One rank in a process of its own, on a host device: what it is told in steps, it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from faulty import FaultyDevice
from kvtide.device.host import HostDevice
from kvtide.ledger import Ledger
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.links import SocketLink
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.messages import Description, decode_description
from kvtide.ranks.ranks import Member
from kvtide.ranks.seat import Seat
from kvtide.ranks.sockets import SchedulerSocket
from kvtide.units import MIB
from ranks_world import layers

_MESSAGE = msgspec.msgpack.Decoder(dict[int, bytes] | None)
_CALLS = ("create", "map", "unmap", "release")


@dataclass(frozen=True)
class Conduct:
    """How a rank behaves: how slow it is, and from which call of its device on it fails or dies.

    `paper` has a device that holds no memory at all; `tells` how long each step took; all steps are
    carried out within `around`.
    """

    step_seconds: float = 0.0
    call_seconds: float = 0.0
    refuse_from: int | None = None
    crash_at: int | None = None
    blocks: int = 100
    block_bytes: int = 2 * MIB
    layers: int = 1
    paper: bool = False
    tells: bool = False
    around: Callable[[Callable[[], None]], None] = lambda body: body()


class RankProcess:
    """The process of one rank, as its scheduler's process sees it."""

    def __init__(self, ledger: Ledger, instance_key: str, rank: int, conduct: Conduct) -> None:
        self.rank = rank
        self.messages = 0
        self._pipe, theirs = multiprocessing.Pipe()
        # Forked: it starts in no time, and what it needs it opens itself.
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(theirs, self._pipe, ledger.path, instance_key, rank, conduct)
        )
        self._process.start()
        theirs.close()
        self.description: Description = decode_description(self._pipe.recv_bytes())
        self.link = SocketLink(rank, SchedulerSocket(self.description.socket))

    def member(self, ledger: Ledger, shape: int = 0) -> Member:
        d = self.description
        return Member(d.rank, shape, d.device_uuid, ledger.account(d.account), self.link, d.pid)

    def step(self, message: dict[int, bytes] | None) -> None:
        """Hand over a step; like an engine, whether or not the rank still lives."""
        self.messages += message is not None and self.rank in message
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(msgspec.msgpack.encode(message))

    def told(self) -> float:
        """Seconds that the rank itself spent on the last step."""
        seconds: float = self._pipe.recv()
        return seconds

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.link.close()
        # Said, since later ranks have inherited this end of the pipe.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_bytes(b"")
        self._pipe.close()
        self._process.join(100)
        assert self._process.exitcode is not None
        self._process.close()


def _run(
    pipe: Connection, other_end: Connection, path: Path, key: str, rank: int, conduct: Conduct
) -> None:
    other_end.close()
    ledger = Ledger.attach(path)
    spec = ledger.spec
    if conduct.paper:
        from paper_device import PaperDevice, PaperMemory

        plain = PaperDevice(PaperMemory(spec.uuid, spec.total_bytes))
    else:
        plain = HostDevice(spec.total_bytes, uuid=spec.uuid)
    device = FaultyDevice(plain, create_answers_none=True)
    geometry = layers(conduct.blocks, conduct.block_bytes, conduct.layers)
    seat = Seat(ledger, ledger.instance(key))
    account = ledger.enroll(
        seat.instance,
        pool_name="kv",
        rank=rank,
        blocks_total=geometry.blocks_total,
        block_bytes=geometry.block_bytes,
        sampler=device.free_bytes,
    )
    memory = RankMemory(device, geometry.arena_bytes, account)
    endpoint = Endpoint(memory, seat, geometry, "test", rank, None)
    endpoint.back_null_block()

    def fails(number: int, verb: str) -> bool:
        if conduct.call_seconds and verb in _CALLS:
            time.sleep(conduct.call_seconds)
        if number == conduct.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return (
            conduct.refuse_from is not None
            and number >= conduct.refuse_from
            and verb in ("create", "map")
        )

    device.arm(fails)
    pipe.send_bytes(endpoint.describe())

    def steps() -> None:
        while said := pipe.recv_bytes():
            message = _MESSAGE.decode(said)
            time.sleep(conduct.step_seconds)
            started = time.perf_counter()
            endpoint.step(message, runs=True)
            if conduct.tells:
                pipe.send(time.perf_counter() - started)

    with suppress(EOFError, ConnectionResetError):
        conduct.around(steps)
    device.disarm()
    endpoint.close()
    ledger.close()
