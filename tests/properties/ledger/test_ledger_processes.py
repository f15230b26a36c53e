"""Real processes grant, create, release, refund and sample at random, and are killed at random."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtide.ledger import Granted, Ledger
from kvtide.ledger import layout as w
from kvtide.ledger.retirement import live_pools
from ledger_device import FAILED, HOLDERS, STEPS, SharedDevice
from ledger_invariants import (
    Held,
    Truth,
    every_byte_has_an_owner,
    live_owner_never_retired,
    no_credit_before_release,
)
from ledger_world import TOTAL, enroll, spec, until

TESTS = Path(__file__).parents[2]
PROCESSES = 4
KILLS = 16


class Holder:
    def __init__(self, directory, device, number, seed) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, "ledger_device.py", directory, device, str(number), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=TESTS,
        )
        self.slot = self.generation = -1

    def ready(self) -> None:
        key = self.process.stdout.readline()
        assert key, "a holder failed to start"
        self.slot, self.generation = map(int, key.split(":"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class World:
    def __init__(self, tmp_path, seed) -> None:
        self.directory, self.path = tmp_path / "kv", tmp_path / "device"
        self.device = SharedDevice(self.path, TOTAL)
        self.ledger = Ledger.open(self.directory, spec())
        self.dice = random.Random(seed)
        self.holders: list[Holder] = []
        self.dead: set[int] = set()
        self.next = 0

    def start(self) -> Holder:
        # A word that a former life's memory is still in is not used again.
        while self.device.words[self.next % HOLDERS]:
            self.next += 1
        holder = Holder(
            self.directory, self.path, self.next % HOLDERS, self.dice.randrange(1 << 30)
        )
        self.next += 1
        return holder

    def check(self) -> None:
        """Against the truth, between two changes of the ledger.

        A holder that has not said its key yet counts as if it used nothing that it was granted.
        """
        with self.ledger.file.change() as words:
            held = self.device.held()
            by_slot = {(h.slot, h.generation): h.number for h in self.holders}
            records = []
            for slot in live_pools(words):
                number = by_slot.pop((slot, words[w.pool_at(slot)]), None)
                charge = words[w.pool_at(slot) + w.P_CHARGE]
                alive = number is not None
                records.append(Held(alive, charge, held[number] if alive else 0))
            truth = Truth(words[w.H_BUDGET], 0, TOTAL - sum(held), records)
        for _ in by_slot:
            live_owner_never_retired(True)
        # Who is alive may create between the reads of the ledger and of the device: within its
        # charge, and both terms below move alike.
        every_byte_has_an_owner(truth)
        no_credit_before_release(truth)
        assert self.device.words[FAILED] == 0, "a granted create found no memory"


@pytest.fixture
def world(tmp_path):
    seed = int(os.environ.get("KVTIDE_INTERNAL_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"seed {seed}")
    world = World(tmp_path, seed)
    yield world
    for holder in world.holders:
        if holder.process.poll() is None:
            holder.kill()
    world.ledger.close()
    world.device.close()


def test_processes_that_are_killed_at_random_lose_nothing_and_use_nothing_twice(world):
    world.holders = [world.start() for _ in range(PROCESSES)]
    for holder in world.holders:
        holder.ready()
    for _ in range(KILLS):
        for _ in range(world.dice.randrange(1, 20)):
            world.check()
            time.sleep(0.001)
        victim = world.dice.choice(world.holders)
        if world.dice.random() < 0.3:  # stopped anywhere, it stops nobody for good
            os.kill(victim.process.pid, signal.SIGSTOP)
            time.sleep(0.005)
            os.kill(victim.process.pid, signal.SIGCONT)
            continue
        fresh = world.start()
        victim.kill()
        world.holders.remove(victim)
        world.check()
        world.ledger.retire_dead()
        world.check()
        # Only now does the driver free what the dead one held.
        world.device.release(victim.number, world.device.held()[victim.number])
        world.check()
        fresh.ready()
        world.holders.append(fresh)
    steps = sum(world.device.words[STEPS : STEPS + HOLDERS].tolist())
    assert steps > 100
    for holder in world.holders:
        holder.kill()
        world.device.release(holder.number, world.device.held()[holder.number])
    world.holders.clear()
    until(lambda: world.ledger.retire_dead() or not world.ledger.snapshot().instances, "all end")
    until(lambda: not (world.ledger.retire_dead() or world.ledger.snapshot().instances), "all end")
    _, account = enroll(world.ledger, "last", world.device.free_bytes)
    assert account.grant(TOTAL) == Granted(TOTAL)
    account.refund(TOTAL)
