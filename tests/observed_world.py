"""Instances that live in a ledger only, with figures and tallies: what observers look at."""

from __future__ import annotations

from pathlib import Path

from kvtide.ledger import DeviceSpec, Granted, Ledger, PoolFigures, State
from kvtide.observe.tally import Cause, Kind, Owner, Tally, Verb
from kvtide.units import MIB

TOTAL = 256 * MIB
BLOCK = MIB


class Engine:
    """One instance with one pool, both held by this process."""

    def __init__(self, ledger: Ledger, name: str, limit_bytes: int | None = None) -> None:
        self.ledger = ledger
        self.instance = ledger.register(name, limit_bytes=limit_bytes, explicit=True)
        self.account = ledger.enroll(
            self.instance,
            pool_name="kv",
            rank=0,
            blocks_total=200,
            block_bytes=BLOCK,
            sampler=lambda: TOTAL,
        )
        self.tally = Tally(ledger.path, Owner.of_key("engine", self.instance.key))
        self.rank_tally = Tally(ledger.path, Owner.of_key("rank", self.account.key))
        self.held = 0
        self.instance.set_state(State.RUNNING)

    def hold(self, used: int, cached: int, idle: int) -> None:
        """Have so many MiB, of each kind."""
        wanted = (used + cached + idle) * MIB
        more = wanted - self.held
        if more > 0:
            assert self.account.grant(more) == Granted(more)
            self.account.created(more)
            self.tally.note(Kind.GROW, Cause.NEED, more)
            self.rank_tally.time(Verb.CREATE, 12_000)
            self.rank_tally.time(Verb.MAP, 3_000)
        elif more < 0:
            self.account.released(-more)
            self.account.refund(-more)
            self.tally.note(Kind.SHRINK, Cause.OTHERS, -more)
            self.rank_tally.time(Verb.RELEASE, 40_000)
        self.held = wanted
        figures = PoolFigures(used + cached + idle, used, cached, 3, (cached + idle) * MIB)
        self.account.publish(figures)

    def close(self) -> None:
        for tally in (self.tally, self.rank_tally):
            tally.close()
        self.account.close()
        self.instance.close()


class World:
    """A device of 256 MiB on paper, and engines on it."""

    def __init__(self, directory: Path, uuid: str = "paper-host", backend: str = "paper") -> None:
        spec = DeviceSpec(uuid, backend, "a device of tests", TOTAL, 0, None, 2 * MIB)
        self.ledger = Ledger.open(directory, spec)
        self.directory = directory
        self.engines: dict[str, Engine] = {}

    def engine(self, name: str, limit_bytes: int | None = None) -> Engine:
        self.engines[name] = Engine(self.ledger, name, limit_bytes)
        return self.engines[name]

    def end(self, name: str) -> None:
        self.engines.pop(name).close()

    def close(self) -> None:
        for name in list(self.engines):
            self.end(name)
        self.ledger.close()
