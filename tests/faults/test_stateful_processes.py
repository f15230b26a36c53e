"""Real processes on one host device, by random rules: what the kernel says against the ledger.

Every process has a ledger, an arena and memory of its own and does what it is told; it is killed or
stopped in between like any other. The seed of a run is printed, and repeats it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from protocol_world import GRANULE, GRANULES, TOTAL, Actor, World
from test_stateful_host import run_steps

from kvtide.device import census
from kvtide.errors import LedgerError
from kvtide.ledger import PoolFigures
from kvtide.ledger import layout as w
from ledger_invariants import (
    Held,
    Truth,
    every_byte_has_an_owner,
    live_owner_never_retired,
    no_credit_before_release,
    require,
)

STEPS = int(os.environ.get("KVTIDE_INTERNAL_STEPS", "25000"))
MOST = 4
number = st.integers(0, 1 << 20)


class Player(Actor):
    """In a child: an actor that remembers its extents, and gives what is demanded of it."""

    def join(self) -> tuple[str, str]:
        self.extents: dict[int, int] = {}
        self.ungrown = 0
        self.register()
        self.enroll()
        self.waker = self.instance.waker()
        return self.instance.key, self.account.key

    def free_runs(self) -> list[int]:
        taken = {n for first, count in self.extents.items() for n in range(first, first + count)}
        return [n for n in range(GRANULES) if n not in taken]

    def take(self, pick: int, count: int) -> bool:
        free = self.free_runs()
        if not free:
            return False
        first = free[pick % len(free)]
        count = next((k for k in range(1, count) if first + k not in free), count)
        if not self.grow(first, count):
            return False
        self.extents[first] = count
        self.stamp(first, count)
        return True

    def stamp(self, first: int, count: int) -> None:
        for n in range(first, first + count):
            at = self.arena.address + n * GRANULE
            self.device.zero([(at, 8)])
            self.device.copy(at + 8, at, 8)

    def give(self, pick: int) -> int:
        if not self.extents:
            return 0
        first = sorted(self.extents)[pick % len(self.extents)]
        count = self.extents.pop(first)
        self.shrink(first, count)
        return count

    def cut(self, pick: int) -> bool:
        large = sorted(first for first, count in self.extents.items() if count > 1)
        if not large:
            return False
        first = large[pick % len(large)]
        before = self.arena.mapped_bytes
        self.split(first, self.extents[first])
        done = self.arena.mapped_bytes < before
        if done:
            self.extents[first] = 1
        return done

    def ask(self, granules: int) -> bool:
        """Granted, and not created yet."""
        granted = self.account.grant(granules * GRANULE)
        if hasattr(granted, "granted_bytes"):
            self.ungrown += granules
            return True
        if granted.sample_is_stale:
            self.account.sample()
        return False

    def return_ungrown(self) -> None:
        self.account.refund(self.ungrown * GRANULE)
        self.ungrown = 0

    def say_idle(self) -> tuple[int, int]:
        idle = sum(self.extents.values()) * GRANULE
        self.account.publish(PoolFigures(0, 0, 0, len(self.extents), idle))
        demand = self.ledger.demands(self.instance)
        assert demand.idle_bytes <= idle
        return demand.idle_bytes, demand.running_bytes

    def obey(self) -> int:
        """Give what is demanded, as an engine does."""
        given = 0
        while self.extents and self.say_idle()[0] > 0:
            given += self.give(0)
        return given

    def load(self, granules: int) -> None:
        self.instance.reserve(granules * GRANULE)
        self.instance.measured(0, "given")
        self.account.sample()

    def end(self) -> None:
        self.return_ungrown()
        self.waker.close()
        self.close()


class Process:
    """A player's process, as the test's sees it."""

    def __init__(self, world: World) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self.pipe.close()
                self._serve(theirs, world)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self.stopped = False
        self.instance_key, self.account_key = self.tell("join")

    @staticmethod
    def _serve(pipe, world: World) -> None:
        player = Player(world.directory, world.uuid)
        while True:
            verb, arguments = pipe.recv()
            pipe.send(getattr(player, verb)(*arguments))
            if verb == "end":
                return

    def tell(self, verb: str, *arguments: object):
        self.pipe.send((verb, arguments))
        return self.pipe.recv()

    def signal(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)
        if what is signal.SIGSTOP:
            os.waitpid(self.pid, os.WUNTRACED)
        self.stopped = what is signal.SIGSTOP

    def gone(self) -> int:
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ProcessMachine(RuleBasedStateMachine):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="kvtide-processes-", dir="/dev/shm"))
        self.world = World(self.base / "kv")
        self.players: list[Process] = []

    def awake(self, pick: int) -> Process | None:
        awake = [p for p in self.players if not p.stopped]
        return awake[pick % len(awake)] if awake else None

    @precondition(lambda self: len(self.players) < MOST)
    @rule()
    def join(self) -> None:
        self.players.append(Process(self.world))
        self.check()

    @rule(who=number, pick=number, count=st.integers(1, 4))
    def take(self, who, pick, count) -> None:
        if player := self.awake(who):
            player.tell("take", pick, count)
        self.check()

    @rule(
        who=number,
        verb=st.sampled_from(["give", "cut", "give", "cut", "take_many"]),
        pick=number,
    )
    def change(self, who, verb, pick) -> None:
        if player := self.awake(who):
            player.tell(*(("take", pick, 4) if verb == "take_many" else (verb, pick)))
        self.check()

    @rule(who=number, verb=st.sampled_from(["say_idle", "obey", "return_ungrown"]))
    def tell(self, who, verb) -> None:
        if player := self.awake(who):
            player.tell(verb)
        self.check()

    @rule(who=number, count=st.integers(0, GRANULES))
    def ask(self, who, count) -> None:
        """Granted within the budget as it was published, or refused."""
        if (player := self.awake(who)) and player.tell("ask", count):
            words = self.world.ledger.file.words
            charged = self.world.ledger.snapshot().charged_bytes
            require(
                "charges_never_above_published_budget_by_a_grant",
                charged <= max(0, words[w.H_BUDGET]) or count == 0,
                (charged, words[w.H_BUDGET]),
            )
        self.check()

    @rule(who=number, count=st.integers(1, 5))
    def load(self, who, count) -> None:
        if player := self.awake(who):
            player.tell("load", count)
        self.check()

    @rule(size=st.integers(0, 8))
    def wish(self, size) -> None:
        self.world.instance.wish(size * GRANULE)
        self.check()

    @rule(who=number, size=st.integers(0, GRANULES), low=st.integers(0, 3))
    def terms(self, who, size, low) -> None:
        instances = self.world.ledger.snapshot().instances
        name = instances[who % len(instances)].name
        limit = size * GRANULE or None
        try:
            self.world.ledger.set_terms(
                name,
                lambda t: t._replace(
                    limit_bytes=limit, min_bytes=min(low * GRANULE, limit or TOTAL)
                ),
            )
        except LedgerError as error:
            assert "its budget is" in str(error)  # noqa: PT017
        self.check()

    @rule()
    def sample(self) -> None:
        assert self.world.account.sample()
        self.check()

    @rule(who=number)
    def kill(self, who) -> None:
        if self.players:
            player = self.players.pop(who % len(self.players))
            player.signal(signal.SIGKILL)
            assert player.gone() == -signal.SIGKILL
        self.check()

    @rule(who=number)
    def stop_or_go_on(self, who) -> None:
        if self.players:
            player = self.players[who % len(self.players)]
            player.signal(signal.SIGCONT if player.stopped else signal.SIGSTOP)
        self.check()

    @rule(who=number)
    def leave(self, who) -> None:
        if player := self.awake(who):
            self.players.remove(player)
            player.tell("end")
            assert player.gone() == 0
        self.check()

    @rule()
    def retire(self) -> None:
        self.world.ledger.retire_dead()
        assert self.world.ledger.retire_dead() == 0
        self.check()

    def check(self) -> None:
        """All are between two steps: the kernel's figures of every process against its record."""
        type(self).steps += 1
        world = self.world
        by_pid: dict[int, int] = {}
        for holding in census.holdings(world.uuid):
            by_pid[holding.pid] = by_pid.get(holding.pid, 0) + holding.size_bytes
        snapshot = world.ledger.snapshot()
        alive = {player.account_key: player.pid for player in self.players}
        alive[world.account.key] = os.getpid()
        records = []
        for instance in snapshot.instances:
            for pool in instance.pools:
                pid = alive.pop(pool.key, None)
                assert pool.live == (pid is not None)
                held = by_pid.pop(pid, 0) if pid else 0
                records.append(Held(pid is not None, pool.charge_bytes, held))
                if pid:
                    require("figures_agree_with_the_kernel", pool.mapped_bytes == held, pool)
        live_owner_never_retired(bool(alive))
        require("nothing_of_the_dead_is_held", not any(by_pid.values()), by_pid)
        free = TOTAL - sum(record.held for record in records)
        truth = Truth(world.ledger.file.words[w.H_BUDGET], 0, free, records)
        every_byte_has_an_owner(truth)
        no_credit_before_release(truth)
        assert not world.ledger.file.words[w.H_SEQUENCE] & 1

    def teardown(self) -> None:
        try:
            for player in self.players:
                player.signal(signal.SIGKILL)
                player.gone()
            self.world.instance.wish(0)
            self.world.ledger.set_terms(
                "neighbour", lambda t: t._replace(limit_bytes=None, min_bytes=0)
            )
            self.world.settle()
            self.world.reuse()
        finally:
            self.world.close()
            shutil.rmtree(self.base)


@pytest.mark.long
def test_processes_on_the_host_device_keep_every_invariant():
    run_steps(ProcessMachine, STEPS, 80)
