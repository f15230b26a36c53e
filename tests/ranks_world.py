"""Engines with several ranks in one process: devices on paper, real ledgers, a transport at will.

Every rank carries out its steps in order but in its own time; what it touches in a step has to be
mapped and unchanged then. Answers come late, twice or in another order, as the test has it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from faulty import FaultyDevice
from kvtide.ledger import Account, DeviceSpec, Ledger, State
from kvtide.pool import FreeBlocks, Geometry, Pool, Reclaim, Run, Strip
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.links import DirectLink, Link
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.messages import Answer, Order
from kvtide.ranks.ranks import Member, Ranks
from kvtide.ranks.seat import Seat
from paper_device import GRANULE, PaperDevice, PaperMemory
from pool_invariants import assert_circulation, assert_mapped_at, assert_pool, assert_quiet


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Block:
    block_id: int


class Blocks:
    """An engine's bookkeeping: free blocks, a prefix cache in order of eviction, live blocks."""

    def __init__(self, blocks_total: int) -> None:
        self.blocks: Sequence[Block] = [Block(n) for n in range(blocks_total)]
        self.free: FreeBlocks[Block] = FreeBlocks(blocks_total, 8)
        self.cached: list[int] = []
        self.live: list[int] = []

    @property
    def cached_count(self) -> int:
        return len(self.cached)

    def cached_ids(self) -> Sequence[int]:
        return self.cached

    def drop_cached(self, gone: np.ndarray) -> None:
        self.cached = [n for n in self.cached if not gone[n]]

    def free_ids(self) -> list[int]:
        return np.flatnonzero(self.free.mask(len(self.blocks))).tolist()

    def take(self, wanted: int) -> list[int] | None:
        if wanted > self.free.count + len(self.cached):
            return None
        taken = [block.block_id for block in self.free.take(wanted)]
        while len(taken) < wanted:
            taken.append(self.cached.pop(0))
        self.live += taken
        return taken

    def give(self, blocks: Sequence[int], *, cache: bool) -> None:
        gone = set(blocks)
        self.live = [n for n in self.live if n not in gone]
        if cache:
            self.cached += blocks
        else:
            self.free.give([self.blocks[n] for n in blocks])


class PaperLink:
    """A rank in another process, its answers in the hands of the test."""

    direct = False

    def __init__(self, endpoint: Endpoint) -> None:
        endpoint.answer_directly()
        self.endpoint = endpoint
        self.ended = False
        self.lossy = False
        self._orders: list[Order] = []
        self.on_the_way: list[Answer] = []
        self._there: list[Answer] = []

    def submit(self, order: Order) -> None:
        self._orders.append(order)

    def take_orders(self) -> tuple[Order, ...]:
        orders, self._orders = tuple(self._orders), []
        return orders

    def send(self) -> None:
        answers = self.endpoint.take_answers()
        if not self.lossy:
            self.on_the_way += answers

    def deliver(self, dice: random.Random | None = None) -> None:
        """All that is on the way arrives; with dice some of it twice, and in any order."""
        if dice is not None and self.on_the_way:
            self.on_the_way += dice.choices(self.on_the_way, k=dice.randrange(2))
            dice.shuffle(self.on_the_way)
        self._there += self.on_the_way
        self.on_the_way = []

    def receive(self) -> list[Answer]:
        there, self._there = self._there, []
        return there

    def close(self) -> None:
        return None


@dataclass
class Step:
    number: int
    message: dict[int, bytes] | None
    touched: list[int]
    fresh: list[int]


@dataclass
class Rank:
    number: int
    geometry: Geometry
    memory: RankMemory
    endpoint: Endpoint
    device: PaperDevice
    faults: FaultyDevice
    account: Account
    steps: deque[Step] = field(default_factory=deque)
    done: int = 0

    def places(self, block: int) -> list[int]:
        base = self.memory.arena.address
        return [
            base + s.offset_bytes + block * s.stride_bytes + edge
            for s in self.geometry.strips
            for edge in (0, s.length_bytes - 1)
        ]

    def run(self, stamps: dict[int, int]) -> None:
        """Carry out the next step, then touch its blocks: nothing may have been lost or moved."""
        step = self.steps.popleft()
        self.endpoint.step(step.message, runs=bool(step.touched))
        for block in step.fresh:
            for place in self.places(block):
                self.device.write(place, (block, stamps[block]))
        for block in step.touched:
            for place in self.places(block):
                assert self.device.read(place) == (block, stamps[block]), f"block {block}"
        for place in self.places(0):
            self.device.write(place, None)
        self.done = step.number


class Engine:
    """An engine of some ranks, on devices on paper.

    Parameters
    ----------
    ledgers, memories
        By device UUID.
    layout
        Of each rank: its device and its geometry.
    """

    def __init__(
        self,
        name: str,
        ledgers: dict[str, Ledger],
        memories: dict[str, PaperMemory],
        layout: Sequence[tuple[str, Geometry]],
        *,
        cap_bytes: int,
        direct: bool = False,
        limit_bytes: int | None = None,
    ) -> None:
        self.clock = Clock()
        self.direct = direct
        geometries = list(dict.fromkeys(geometry for _, geometry in layout))
        seats = {
            uuid: Seat(
                ledgers[uuid],
                ledgers[uuid].register(name, explicit=True, limit_bytes=limit_bytes),
            )
            for uuid in sorted({uuid for uuid, _ in layout})
        }
        self.ranks = [
            self._rank(n, uuid, geometry, seats[uuid], memories[uuid])
            for n, (uuid, geometry) in enumerate(layout)
        ]
        kind = DirectLink if direct else PaperLink
        self.links: list[Link] = [kind(rank.endpoint) for rank in self.ranks]
        members = [
            Member(
                rank.number,
                geometries.index(rank.geometry),
                uuid,
                seats[uuid].ledger.account(rank.account.key),
                link,
            )
            for rank, (uuid, _), link in zip(self.ranks, layout, self.links, strict=True)
        ]
        self.pool = Pool(geometries, cap_bytes)
        self.blocks = Blocks(self.pool.blocks_total)
        self.memory: GrowingMemory[Block] = GrowingMemory(
            seats,
            Ranks(members, clock=self.clock),
            self.pool,
            self.blocks,
            cap_bytes,
            clock=self.clock,
        )
        first = {m.shape: rank for m, rank in zip(members, self.ranks, strict=True)}
        self.memory.adopt(
            [
                [Run(o // GRANULE, n // GRANULE) for o, n in first[s].memory.places]
                for s in range(len(geometries))
            ]
        )
        self.memory.show(State.RUNNING)
        self.stamps: dict[int, int] = {}
        self.steps = self.misses = self.splits = self.staged = 0
        self._watch_splits()
        self._fresh: list[int] = []
        self._leaving: deque[tuple[int, list[int], bool]] = deque()

    def _rank(
        self,
        number: int,
        uuid: str,
        geometry: Geometry,
        seat: Seat,
        memory: PaperMemory,
    ) -> Rank:
        device = memory.open()
        faults = FaultyDevice(device, create_answers_none=True)
        account = seat.ledger.enroll(
            seat.instance,
            pool_name="kv",
            rank=number,
            blocks_total=geometry.blocks_total,
            block_bytes=geometry.block_bytes,
            sampler=device.free_bytes,
        )
        rank_memory = RankMemory(faults, geometry.arena_bytes, account)
        endpoint = Endpoint(rank_memory, seat, geometry, "paper", number, 0)
        endpoint.back_null_block()

        def before_create(size_bytes: int) -> None:
            held_bytes = rank_memory.arena.mapped_bytes + rank_memory.arena.quarantined_bytes
            assert counted_bytes(account) + size_bytes <= account.charge_bytes, held_bytes

        device.before_create = before_create
        return Rank(number, geometry, rank_memory, endpoint, device, faults, account)

    def _watch_splits(self) -> None:
        shrink = self.memory.changes.shrink

        def counted(reclaim: Reclaim, *args: object, **kwargs: object) -> None:
            splits = [s for shrink in reclaim.shrinks for s in shrink.splits]
            self.splits += len(splits)
            self.staged += sum(bool(s.staging) for s in splits)
            shrink(reclaim, *args, **kwargs)  # type: ignore[arg-type]

        self.memory.changes.shrink = counted  # type: ignore[method-assign, assignment]

    # What an engine does -------------------------------------------------------------------------

    def take(self, wanted: int) -> list[int] | None:
        """Have blocks, as a scheduler does between two calls of settle."""
        taken = self.blocks.take(wanted)
        if taken is not None:
            for block in taken:
                self.stamps[block] = self.stamps.get(block, 0) + 1
            self._fresh += taken
        return taken

    def give(self, blocks: Sequence[int], *, cache: bool = False) -> None:
        """Let blocks go, when no step that could touch them is still on its way."""
        if self.direct or not any(rank.steps for rank in self.ranks):
            self.blocks.give(blocks, cache=cache)
        else:
            self._leaving.append((self.steps, list(blocks), cache))

    def step(self, wanted: int = 0, *, press: bool = False, idle: bool = False) -> list[int] | None:
        """One round: settle, give to others, grow, allocate `wanted` blocks, send the orders."""
        done = min((rank.done for rank in self.ranks), default=0)
        while self._leaving and (self._leaving[0][0] <= done or self.direct):
            _, blocks, cache = self._leaving.popleft()
            self.blocks.give(blocks, cache=cache)
        self.memory.settle()
        self.memory.publish()
        if press:
            self.memory.hurry()
            self.memory.yield_to_others()
        if idle:
            self.memory.trim()
        taken: list[int] | None = None
        if wanted:
            taken = self.take(wanted)
            if taken is None:
                self.misses += 1
                self.memory.grow_for(wanted - self.memory.free_count, wanted)
                if self.direct:
                    taken = self.take(wanted)
            if taken is not None:
                self.memory.end_wish()
        self.steps += 1
        fresh, self._fresh = self._fresh, []
        leaving = [b for _, blocks, _ in self._leaving for b in blocks]
        touched = [b for b in self.blocks.live if b not in leaving]
        message = self.memory.ranks.message()
        for rank in self.ranks:
            rank.steps.append(Step(self.steps, message, touched, fresh))
            if self.direct:
                rank.run(self.stamps)
        return taken

    def run_ranks(self) -> None:
        """Every rank carries out all of its steps, and all answers arrive."""
        for rank, link in zip(self.ranks, self.links, strict=True):
            while rank.steps:
                rank.run(self.stamps)
            if isinstance(link, PaperLink):
                link.send()
                link.deliver()

    def quieten(self) -> None:
        """Until nothing is under way."""
        for _ in range(50):
            self.run_ranks()
            self.memory.settle()
            if (
                not self.memory.pending
                and not self._leaving
                and not any(rank.steps for rank in self.ranks)
            ):
                return
            self.step()
        raise AssertionError("it does not come to rest")

    def squeeze(self) -> None:
        """Give to others until there is no more to give."""
        for _ in range(200):
            self.memory.publish()
            going = self.memory.yield_to_others()
            self.step()
            self.quieten()
            if not going:
                return
        raise AssertionError("it gives for ever")

    # What must hold ------------------------------------------------------------------------------

    def check(self) -> None:
        """At all times."""
        assert_pool(self.pool)
        free, blocks = self.blocks.free_ids(), self.blocks
        assert_circulation(self.pool, free, blocks.cached, blocks.live)
        assert (self.memory.coming_count > 0) == self.memory.growing
        handed = [0, *free, *blocks.cached, *blocks.live]
        for rank in self.ranks:
            assert_mapped_at(rank.memory.arena, rank.geometry, handed)
            arena = rank.memory.arena
            assert counted_bytes(rank.account) == arena.mapped_bytes + arena.quarantined_bytes
            assert counted_bytes(rank.account) <= rank.account.charge_bytes

    def check_quiet(self) -> None:
        """When nothing is under way."""
        self.check()
        assert self.memory.coming_count == 0
        for member, rank in zip(self.memory.ranks.members, self.ranks, strict=True):
            shape = self.pool.shapes[member.shape]
            counted = counted_bytes(rank.account)
            assert_quiet(rank.memory.arena, shape, rank.account.charge_bytes, counted)

    def mapped_bytes(self) -> list[int]:
        return [rank.memory.arena.mapped_bytes for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.faults.disarm()
            rank.endpoint.close()
        self.memory.close()
        for seat in self.memory.seats.values():
            seat.instance.close()


def counted_bytes(account: Account) -> int:
    """Created and not released, by the account's own words."""
    from kvtide.ledger import layout as w

    words, at = account._words, account._at
    return words[at + w.P_CREATED] - words[at + w.P_RELEASED]


class World:
    """Devices on paper with a ledger each, and engines on them."""

    def __init__(
        self,
        directory: Path,
        devices: int = 1,
        total_bytes: int = 64 * GRANULE,
        memory: Callable[[str, int], PaperMemory] = PaperMemory,
    ) -> None:
        uuids = [f"paper-{n}" for n in range(devices)]
        self.memories = {uuid: memory(uuid, total_bytes) for uuid in uuids}
        self.ledgers = {
            uuid: Ledger.open(
                directory, DeviceSpec(uuid, "host", "paper", total_bytes, 0, None, GRANULE)
            )
            for uuid in uuids
        }
        self.engines: list[Engine] = []

    def engine(
        self,
        layout: Sequence[tuple[int, Geometry]],
        *,
        cap_bytes: int = 8 * GRANULE,
        direct: bool = False,
        limit_bytes: int | None = None,
    ) -> Engine:
        engine = Engine(
            f"engine-{len(self.engines)}",
            self.ledgers,
            self.memories,
            [(f"paper-{device}", geometry) for device, geometry in layout],
            cap_bytes=cap_bytes,
            direct=direct,
            limit_bytes=limit_bytes,
        )
        self.engines.append(engine)
        return engine

    def wish(self, engine: Engine, size_bytes: int) -> None:
        """An engine wishes for so much on every device."""
        for seat in engine.memory.seats.values():
            seat.instance.wish(size_bytes)

    def check(self) -> None:
        for engine in self.engines:
            engine.check()
        for uuid, memory in self.memories.items():
            held = sum(
                counted_bytes(rank.account)
                for engine in self.engines
                for rank in engine.ranks
                if rank.device.memory is memory
            )
            assert memory.held_bytes == held, uuid

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for ledger in self.ledgers.values():
            ledger.close()


def layers(blocks: int, block_bytes: int, count: int) -> Geometry:
    """So many equal layers, each behind the other."""
    page = block_bytes // count
    strips = [Strip(n * blocks * page, page, page) for n in range(count)]
    return Geometry.of(blocks, strips, GRANULE)
