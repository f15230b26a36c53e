"""A host device and its ledger, a neighbour that lives on, and scripts of every protocol step."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from surroundings import assert_whole

from kvtide.device import census
from kvtide.device.host import HostDevice
from kvtide.errors import KvtideError
from kvtide.ledger import DeviceSpec, Granted, Ledger, PoolFigures, State
from kvtide.ledger import layout as w
from kvtide.memory import Arena, Span
from kvtide.observe.tallies import sweep
from kvtide.observe.tally import tallies_of
from kvtide.pool import Pool, Run
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.links import DirectLink
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.ranks import Member, Ranks
from kvtide.ranks.seat import Seat
from kvtide.units import MIB
from ledger_world import until
from ranks_world import Blocks, layers

GRANULE = 2 * MIB
GRANULES = 24
TOTAL = GRANULES * GRANULE


class Actor:
    """What a script plays with, in a child: a ledger, a device, an instance, a pool, an arena."""

    def __init__(self, directory: Path, uuid: str) -> None:
        self.device = HostDevice(TOTAL, uuid=uuid)
        self.ledger = Ledger.open(directory, spec(uuid))
        self.granted = 0

    def register(self) -> None:
        self.instance = self.ledger.register("actor", explicit=False, limit_bytes=TOTAL)

    def enroll(self) -> None:
        self.account = self.ledger.enroll(
            self.instance,
            pool_name="kv",
            rank=0,
            blocks_total=GRANULES,
            block_bytes=GRANULE,
            sampler=self.device.free_bytes,
        )
        self.arena = Arena(self.device, TOTAL, self.account)

    def grow(self, first: int, granules: int) -> bool:
        size = granules * GRANULE
        if not isinstance(self.account.grant(size), Granted):
            return False
        if not self.arena.grow([Span(first * GRANULE, size)]):
            self.account.refund(size)
            return False
        return True

    def shrink(self, first: int, granules: int) -> None:
        self.arena.shrink([Span(first * GRANULE, granules * GRANULE)])
        self.account.refund(granules * GRANULE)

    def split(self, first: int, granules: int) -> None:
        if not isinstance(self.account.grant(GRANULE), Granted):
            return
        span = Span(first * GRANULE, granules * GRANULE)
        done = self.arena.split(span, [Span(span.offset_bytes, GRANULE)])
        self.account.refund(granules * GRANULE if done else GRANULE)

    def publish(self) -> None:
        self.account.publish(PoolFigures(1, 0, 1, 1, GRANULE))
        self.ledger.demands(self.instance)

    def close(self) -> None:
        self.arena.close()
        self.account.close()
        self.instance.close()
        self.ledger.close()


def spec(uuid: str) -> DeviceSpec:
    return DeviceSpec(uuid, "host", "test", TOTAL, 0, None, GRANULE)


class _FewProcesses:
    """`os` for the census, which looks at this process and its children alone: all that can hold.

    The figures are the kernel's still, and looking at every process of the machine costs the time
    of a whole schedule.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._children = f"/proc/{self._pid}/task/{self._pid}/children"
        self.narrow = os.path.exists(self._children)  # noqa: PTH110 - where the kernel has it

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def listdir(self, path: object) -> list[str]:
        if path != "/proc" or not self.narrow:
            return os.listdir(path)  # noqa: PTH208 - as the census calls it
        return [str(self._pid), *Path(self._children).read_text().split()]


class World:
    """The ledger with a neighbour in this process, who holds memory and outlives all others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._few = census.os = _FewProcesses()  # type: ignore[assignment]
        self.uuid = f"test-points-{os.getpid()}-{random.randrange(1 << 30)}"
        self.device = HostDevice(TOTAL, uuid=self.uuid)
        self.ledger = Ledger.open(directory, spec(self.uuid))
        self.instance = self.ledger.register("neighbour", explicit=True)
        self.account = self.ledger.enroll(
            self.instance,
            pool_name="kv",
            rank=0,
            blocks_total=GRANULES,
            block_bytes=GRANULE,
            sampler=self.device.free_bytes,
        )
        self.arena = Arena(self.device, TOTAL, self.account)
        self.waker = self.instance.waker()
        assert isinstance(self.account.grant(2 * GRANULE), Granted)
        assert self.arena.grow([Span(0, 2 * GRANULE)])
        self.files = {path.name for path in directory.iterdir()}

    def actor(self) -> Actor:
        return Actor(self.directory, self.uuid)

    def settle(self) -> None:
        """Whoever died is retired; then all figures agree and nothing of the dead is left."""
        ledger = self.ledger

        def alone() -> bool:
            ledger.retire_dead()
            return [i.name for i in ledger.snapshot().instances] == ["neighbour"]

        until(alone, "the dead are retired", 60)
        until(lambda: census.used_bytes(self.uuid) == 2 * GRANULE, "their memory is gone", 60)
        until(lambda: self.account.sample(), "a sample is published", 60)
        assert_whole(ledger)
        (view,) = ledger.snapshot().instances
        (pool,) = view.pools
        # The kernel's figure, the ledger's, and the holder's own are one.
        held = census.used_bytes(self.uuid)
        assert pool.charge_bytes == pool.mapped_bytes == held == self.arena.mapped_bytes
        assert ledger.snapshot().budget_bytes == TOTAL
        words = ledger.file.words
        assert words[w.H_POOLS_HIGH] >= 1
        sweep(tallies_of(ledger.path), ledger.snapshot())  # as whoever registers next does
        files = {path.name for path in self.directory.iterdir()}
        assert files == self.files, f"left behind: {files - self.files}"

    def reuse(self) -> None:
        """All that the dead had can be had again: memory, name, records."""
        rest = TOTAL - 2 * GRANULE
        assert self.account.grant(rest) == Granted(rest)
        assert self.arena.grow([Span(2 * GRANULE, rest)])
        assert self.account.grant(1).reason == "budget"
        self.arena.shrink([Span(2 * GRANULE, rest)])
        self.account.refund(rest)
        self.ledger.register("actor", explicit=True).close()
        # Every process of the machine agrees.
        few, self._few.narrow = self._few.narrow, False
        assert census.used_bytes(self.uuid) == 2 * GRANULE
        self._few.narrow = few

    def close(self) -> None:
        census.os = os
        self.waker.close()
        self.arena.close()
        self.account.close()
        self.instance.close()
        self.ledger.close()
        self.device.close()
        assert census.used_bytes(self.uuid) == 0


def engine(world: World) -> Callable[[], None]:
    """An engine whose scheduler and rank are this process: orders, outcomes, wishes, giving."""

    def body() -> None:
        device = HostDevice(TOTAL, uuid=world.uuid)
        ledger = Ledger.open(world.directory, spec(world.uuid))
        seat = Seat(ledger, ledger.register("actor", explicit=True))
        geometry = layers(GRANULES, GRANULE, 1)
        account = ledger.enroll(
            seat.instance,
            pool_name="kv",
            rank=0,
            blocks_total=GRANULES,
            block_bytes=GRANULE,
            sampler=device.free_bytes,
        )
        endpoint = Endpoint(
            RankMemory(device, geometry.arena_bytes, account), seat, geometry, "test", 0, 0
        )
        endpoint.back_null_block()
        member = Member(0, 0, world.uuid, ledger.account(account.key), DirectLink(endpoint))
        blocks = Blocks(GRANULES)
        memory: GrowingMemory = GrowingMemory(
            {world.uuid: seat}, Ranks([member]), Pool([geometry], 8 * GRANULE), blocks, 8 * GRANULE
        )
        memory.adopt([[Run(0, 1)]])
        memory.show(State.RUNNING)
        memory.grow_for(8, 8)
        taken = blocks.take(6)
        memory.publish()
        assert taken is not None
        memory.grow_for(GRANULES * 2, GRANULES * 2)
        memory.grow_for(12, 12)
        blocks.give(taken[1:4], cache=True)
        blocks.give(taken[4:], cache=False)
        seat.instance.wish(0)
        ledger.ask_to_trim("actor", 3 * GRANULE)
        memory.publish()
        memory.yield_to_others()
        memory.settle()
        memory.trim()
        memory.end_wish()
        endpoint.close()
        memory.close()
        seat.instance.close()
        ledger.close()

    return body


def scripts(world: World) -> dict[str, Callable[[], Callable[[], object]]]:
    """By protocol step: what makes it ready, outside of the fault points, and then the step."""

    def ready(grown: int = 0) -> Actor:
        actor = world.actor()
        actor.register()
        actor.enroll()
        if grown:
            assert actor.grow(0, grown)
        return actor

    def with_dead() -> Actor:
        actor = ready()
        # A second life of the same process, whose leases the kernel has dropped.
        dead = world.actor().ledger
        account = dead.enroll(
            dead.register("dead", explicit=True),
            pool_name="kv",
            rank=1,
            blocks_total=1,
            block_bytes=1,
            sampler=lambda: TOTAL,
        )
        account.grant(GRANULE)
        dead.close()
        return actor

    def register() -> Callable[[], object]:
        actor = world.actor()
        return lambda: (actor.register(), actor.instance.waker())

    def enroll() -> Callable[[], object]:
        actor = world.actor()
        actor.register()
        return actor.enroll

    def step(play: Callable[[Actor], object], grown: int = 0):
        def prepare() -> Callable[[], object]:
            actor = ready(grown)
            return lambda: play(actor)

        return prepare

    def reserve(actor: Actor) -> None:
        actor.instance.reserve(4 * GRANULE)
        actor.instance.loaded(GRANULE)
        actor.instance.measured(3 * GRANULE, "given")
        actor.account.sample()

    def terms(actor: Actor) -> None:
        actor.ledger.set_terms("actor", lambda t: t._replace(min_bytes=GRANULE, priority=3))
        actor.ledger.set_limit("actor", None)
        actor.ledger.ask_to_trim("actor", GRANULE)

    def wish(actor: Actor) -> None:
        actor.instance.set_state(State.WAITING)
        actor.instance.wish(2 * GRANULE, least_bytes=GRANULE)
        actor.ledger.demands(actor.instance)
        actor.instance.wish(0)

    return {
        "register": register,
        "enroll": enroll,
        "grant": step(lambda a: a.account.grant(GRANULE)),
        "refused": step(lambda a: a.account.grant(2 * TOTAL)),
        "refund": step(lambda a: a.account.refund(GRANULE), 2),
        "sample": step(lambda a: a.account.sample(), 1),
        "retire": lambda: with_dead().ledger.retire_dead,
        "grow": step(lambda a: a.grow(4, 3)),
        "shrink": step(lambda a: a.shrink(0, 4), 4),
        "split": step(lambda a: a.split(0, 4), 4),
        "reservation": step(reserve),
        "terms": step(terms),
        "wish": step(wish, 1),
        "publish": step(lambda a: a.publish(), 1),
        "close": step(lambda a: a.close(), 3),
        "engine": lambda: engine(world),
    }


def long_script(actor: Actor, dice: random.Random, moves: int) -> None:
    """A life: everything that a member does, at random, until it closes orderly."""
    actor.register()
    actor.enroll()
    extents: dict[int, int] = {}
    for _ in range(moves):
        move = dice.randrange(10)
        free = [n for n in range(GRANULES) if not any(f <= n < f + k for f, k in extents.items())]
        if move <= 2 and free:
            first = dice.choice(free)
            count = next((k for k in range(1, 4) if first + k not in free), 4)
            if actor.grow(first, count):
                extents[first] = count
        elif move == 3 and extents:
            first = dice.choice(list(extents))
            actor.shrink(first, extents.pop(first))
        elif move == 4 and extents:
            first = dice.choice(list(extents))
            if extents[first] > 1:
                before = actor.arena.mapped_bytes
                actor.split(first, extents[first])
                if actor.arena.mapped_bytes < before:
                    extents[first] = 1
        elif move == 5:
            actor.account.sample()
            actor.ledger.retire_dead()
        elif move == 6:
            actor.publish()
        elif move == 7:
            actor.instance.wish(dice.randrange(1, 9) * GRANULE)
        elif move == 8:
            actor.instance.wish(0)
            actor.instance.reserve(GRANULE)
            actor.instance.loaded(GRANULE // 2)
            actor.instance.measured(GRANULE, "torch")
        else:
            try:
                actor.ledger.set_terms(
                    actor.instance.name, lambda t: t._replace(min_bytes=GRANULE, headroom_bytes=0)
                )
            except KvtideError:
                time.sleep(0)
    actor.close()
