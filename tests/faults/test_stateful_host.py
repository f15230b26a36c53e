"""Ledger, pool, arena and ranks together on the host device, in one process, by random rules.

What hypothesis draws it also shrinks; the seed of a run is printed, and repeats it.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from host_backed import HostMemory
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from surroundings import descriptors

from kvtide.errors import LedgerError, UsageError
from kvtide.memory import carrying
from ledger_invariants import Held, Truth, every_byte_has_an_owner, no_credit_before_release
from paper_device import GRANULE
from ranks_schedules import KINDS, Schedule
from ranks_world import counted_bytes

STEPS = int(os.environ.get("KVTIDE_INTERNAL_STEPS", "25000"))
randoms = st.randoms(use_true_random=False)


class EngineMachine(RuleBasedStateMachine):
    """Engines of one to eight ranks on one to four host devices, with others who press them."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtide-stateful-", dir="/dev/shm"))
        self.directory.chmod(0o700)
        self.schedule: Schedule | None = None
        self.over = self.foreign_ever = False

    @initialize(dice=randoms)
    def start(self, dice) -> None:
        self.schedule = Schedule(dice, self.directory, HostMemory, totals=(72, 80))

    @rule(kind=st.sampled_from([k for k in KINDS if k != "lose"]), dice=randoms)
    def move(self, kind, dice) -> None:
        if self.over:
            return
        self.schedule.dice = dice
        self.foreign_ever |= kind == "ballast"
        self.over = not self.schedule.go_on(kind)
        self.check()

    @rule(dice=randoms, size=st.sampled_from([0, 2, 12, 400]))
    def limit(self, dice, size) -> None:
        engine = dice.choice(self.schedule.engines)
        for seat in engine.memory.seats.values():
            try:
                seat.ledger.set_terms(
                    seat.instance.name,
                    lambda t: t._replace(
                        limit_bytes=size * GRANULE or None,
                        min_bytes=min(t.min_bytes, size * GRANULE),
                    ),
                )
            except UsageError as error:
                if "can never give back" not in str(error):
                    raise
        self.check()

    @rule(dice=randoms, size=st.sampled_from([0, 2, 6]), priority=st.integers(-1, 1))
    def terms(self, dice, size, priority) -> None:
        engine = dice.choice(self.schedule.engines)
        for seat in engine.memory.seats.values():
            low = size * GRANULE
            try:
                seat.ledger.set_terms(
                    seat.instance.name,
                    lambda t, low=low: t._replace(
                        min_bytes=low if t.limit_bytes is None else min(low, t.limit_bytes),
                        priority=priority,
                    ),
                )
            except LedgerError as error:
                if "its budget is" not in str(error):
                    raise
        self.check()

    @rule(dice=randoms, size=st.integers(0, 8), running=st.booleans())
    def trim(self, dice, size, running) -> None:
        engine = dice.choice(self.schedule.engines)
        for seat in engine.memory.seats.values():
            seat.ledger.ask_to_trim(seat.instance.name, size * GRANULE, running=running)
        self.check()

    @rule(size=st.integers(1, 6))
    def reserve(self, size) -> None:
        """One of those outside loads something beside its pools, and is done at once."""
        for outsider, memory in zip(
            self.schedule.outsiders, self.schedule.world.memories.values(), strict=True
        ):
            outsider.reserve(size * GRANULE)
            if memory.free_bytes > size * GRANULE:
                outsider.loaded(size * GRANULE)
            outsider.measured(0, "given")
        self.check()

    @rule(dice=randoms)
    def sample(self, dice) -> None:
        engine = dice.choice(self.schedule.engines)
        assert dice.choice(engine.ranks).account.sample()
        self.check()

    def check(self) -> None:
        """By name, for every device: the ledger against the kernel."""
        type(self).steps += 1
        world = self.schedule.world
        held = {
            rank.account.key: (rank.device.memory, counted_bytes(rank.account))
            for engine in world.engines
            for rank in engine.ranks
        }
        for ledger, memory in zip(world.ledgers.values(), world.memories.values(), strict=True):
            snapshot = ledger.snapshot()
            records = []
            for instance in snapshot.instances:
                for pool in instance.pools:
                    assert pool.live, "live_owner_never_retired"
                    where, size = held.get(pool.key, (memory, 0))
                    size = size if where is memory else 0
                    records.append(Held(True, pool.charge_bytes, size))
            budget = ledger.file.words[7]
            truth = Truth(budget, 0, memory.free_bytes, records)
            every_byte_has_an_owner(truth)
            if not memory.foreign_bytes and not self.foreign_ever:
                no_credit_before_release(truth)
            assert snapshot.budget_bytes <= memory.total_bytes

    def teardown(self) -> None:
        schedule = self.schedule
        if schedule is None:
            shutil.rmtree(self.directory)
            return
        try:
            if not self.over:
                schedule.dice = random.Random(1)
                schedule.rest()
        finally:
            schedule.close()
            shutil.rmtree(self.directory)


class FewDice(random.Random):
    """Ends after so many draws, as hypothesis does when an example grows too large."""

    class NoMoreError(Exception):
        pass

    def __init__(self, draws: int) -> None:
        super().__init__(draws)
        self.left = draws

    def choice(self, seq):
        if self.left == 0:
            raise self.NoMoreError
        self.left -= 1
        return super().choice(seq)


def test_a_schedule_that_is_given_up_while_it_is_made_leaves_nothing_open(tmp_path):
    given_up = 0
    for draws in range(20):
        directory = tmp_path / str(draws)
        directory.mkdir(mode=0o700)
        before = descriptors()
        try:
            Schedule(FewDice(draws), directory, HostMemory, totals=(72, 80)).close()
        except FewDice.NoMoreError:
            given_up += 1
        assert descriptors() == before, f"after {draws} draws"
    assert 5 < given_up < 20


def run_steps(machine: type[RuleBasedStateMachine], steps: int, each: int) -> None:
    """Run a machine until it has made so many steps without a violation."""
    machine.steps = 0
    first = int(os.environ.get("KVTIDE_INTERNAL_SEED", "0")) or random.randrange(1, 1 << 30)
    examples = 25
    number = first
    while machine.steps < steps:
        print(f"seed {number}, {machine.steps} steps so far")
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=each,
                deadline=None,
                database=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        number += 1
    print(f"{machine.steps} steps from seed {first}: no violation")


@pytest.mark.long
def test_engines_on_the_host_device_keep_every_invariant(monkeypatch):
    monkeypatch.setattr(carrying, "_PAUSE_SECONDS", 0.0)
    run_steps(EngineMachine, STEPS, 100)
