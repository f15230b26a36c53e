"""Random schedules of engines with many ranks and injected faults, with the shared invariants.

    python tests/ranks_schedules.py --count 10000

One schedule is one number: the same number is the same schedule.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvtide.errors import DeviceError, RankLostError
from kvtide.memory import carrying
from kvtide.pool import Geometry
from kvtide.units import MIB
from paper_device import GRANULE, PaperMemory
from ranks_world import Engine, PaperLink, World, layers

_GEOMETRIES = (
    (40, 2 * MIB, 1),
    (24, 3 * MIB, 1),
    (30, 4 * MIB, 2),
    (200, 256 << 10, 2),
    (18, 6 * MIB, 2),
)


KINDS = (
    *("step", "press", "idle", "rank", "deliver", "let go", "ballast", "fault", "heal"),
    *("time", "surplus", "lose", "wish", "ahead", "fill"),
)
_WEIGHTS = (20, 12, 2, 40, 25, 14, 3, 3, 4, 10, 4, 0.05, 4, 4, 2)


def _geometry(dice: random.Random, blocks: int | None = None) -> Geometry:
    count, block_bytes, layer_count = dice.choice(_GEOMETRIES)
    return layers(blocks or count, block_bytes, layer_count)


def _engine(dice: random.Random, world: World, devices: int, limit: int | None) -> Engine:
    count = dice.choice((1, 2, 2, 2, 4, 8))
    first = dice.randrange(devices)
    geometry = _geometry(dice)
    stages = [geometry]
    if count > 1 and dice.random() < 0.3:
        stages.append(_geometry(dice, geometry.blocks_total))
    layout = [((first + n) % devices, stages[n * len(stages) // count]) for n in range(count)]
    return world.engine(
        layout,
        cap_bytes=GRANULE << dice.randrange(5),
        direct=count == 1 and dice.random() < 0.5,
        limit_bytes=limit,
    )


class Schedule:
    """One schedule: a world, and moves at random until it ends."""

    def __init__(
        self,
        dice: random.Random,
        directory: Path,
        memory: Callable[[str, int], PaperMemory] = PaperMemory,
        totals: tuple[int, ...] = (72, 96, 160),
    ) -> None:
        self.dice = dice
        self.happened: Counter[str] = Counter()
        devices = dice.choice((1, 2, 2, 4))
        self.world = World(directory, devices, dice.choice(totals) * GRANULE, memory)
        # Whose dice hypothesis draws may be told in the middle that there are no more.
        with ExitStack() as given_up:
            given_up.callback(self.close)
            self._people(devices)
            given_up.pop_all()

    def _people(self, devices: int) -> None:
        dice = self.dice
        # Another instance on every device that only wishes, and before all others.
        self.outsiders = [
            ledger.register("outsider", explicit=True) for ledger in self.world.ledgers.values()
        ]
        self.fillers = [
            ledger.enroll(
                outsider,
                pool_name="kv",
                rank=0,
                blocks_total=1,
                block_bytes=1,
                sampler=lambda memory=memory: memory.free_bytes,
            )
            for ledger, outsider, memory in zip(
                self.world.ledgers.values(),
                self.outsiders,
                self.world.memories.values(),
                strict=True,
            )
        ]
        for _ in range(dice.choice((1, 2, 2))):
            _engine(dice, self.world, devices, dice.choice((None, None, 60 * GRANULE)))
        self.engines = self.world.engines
        self.requests: dict[Engine, list[list[int]]] = {e: [] for e in self.engines}
        self.lost = False

    def close(self) -> None:
        """End all engines, and let go of the ledgers and of the memory."""
        self.world.close()
        for memory in self.world.memories.values():
            memory.close()

    def run(self, moves: int) -> None:
        for _ in range(moves):
            if not self.go_on():
                return
        self.rest()

    def go_on(self, kind: str | None = None) -> bool:
        """One move and a check; False where the schedule is over."""
        try:
            self.move(kind or self.dice.choices(KINDS, _WEIGHTS)[0])
        except DeviceError as error:
            # The one end there is when a device breaks down just while it carries over what is in
            # use: it is said, and nothing goes on.
            if "had to be moved" not in str(error) and "injected" not in str(error):
                raise
            self.happened["carried and lost"] += 1
            return False
        self.world.check()
        return not self.lost

    def move(self, kind: str) -> None:
        dice, engine = self.dice, self.dice.choice(self.engines)
        if kind in ("step", "press", "idle") and len(engine.ranks[0].steps) < 4:
            wanted = dice.choice((0, 1, 4, 12, 30)) if kind != "idle" else 0
            taken = engine.step(wanted, press=kind == "press", idle=kind == "idle")
            if taken:
                self.requests[engine].append(taken)
        elif kind == "rank":
            number = dice.randrange(len(engine.ranks))
            if engine.ranks[number].steps:
                engine.ranks[number].run(engine.stamps)
                link = engine.links[number]
                if isinstance(link, PaperLink):
                    link.send()
        elif kind == "deliver":
            link = dice.choice(engine.links)
            if isinstance(link, PaperLink):
                link.deliver(dice)
            engine.memory.settle()
        elif kind == "let go" and self.requests[engine]:
            requests = self.requests[engine]
            request = requests.pop(dice.randrange(len(requests)))
            part = dice.sample(request, dice.randint(1, len(request)))
            engine.give(part, cache=dice.random() < 0.5)
            rest = [b for b in request if b not in part]
            if rest:
                requests.append(rest)
        elif kind == "ballast":
            memory = dice.choice(list(self.world.memories.values()))
            memory.foreign_bytes = dice.choice((0, 4, 16, 64)) * GRANULE
        elif kind == "fault":
            call, verbs = (
                dice.randrange(6),
                dice.choice((("create",), ("map",), ("unmap",), ("release",), ("create", "map"))),
            )
            dice.choice(engine.ranks).faults.arm(
                lambda number, verb: number >= call and verb in verbs
            )
        elif kind == "heal":
            for rank in engine.ranks:
                rank.faults.disarm()
        elif kind == "time":
            engine.clock.now += dice.choice((0.1, 1.0, 5.0))
        elif kind == "surplus":
            engine.memory.give_surplus()
        elif kind == "wish":
            for outsider in self.outsiders:
                outsider.wish(dice.choice((0, 10, 1000)) * GRANULE)
        elif kind == "fill":
            for filler, ledger in zip(self.fillers, self.world.ledgers.values(), strict=True):
                if filler.charge_bytes:
                    filler.refund(filler.charge_bytes)
                else:
                    filler.grant(ledger.snapshot().free_bytes)
        elif kind == "ahead":
            engine.memory.grow(dice.randrange(1, 9))
        elif kind == "lose":
            self.lose(engine)

    def lose(self, engine: Engine) -> None:
        """An answer is lost: the engine ends clearly, and never goes on with a wrong picture."""
        links = [link for link in engine.links if isinstance(link, PaperLink)]
        if not links or not engine.memory.pending:
            return
        for link in links:
            link.on_the_way = []
            link.lossy = True
        for rank, link in zip(engine.ranks, links, strict=True):
            while rank.steps:
                rank.run(engine.stamps)
            link.send()
        for rank in engine.ranks:
            rank.faults.disarm()
        engine.step()
        engine.clock.now += 1000
        try:
            for _ in range(3):
                engine.memory.settle()
        except RankLostError:
            self.lost = True
            self.happened["lost"] += 1
        assert self.lost or not engine.memory.pending

    def rest(self) -> None:
        """Nothing goes wrong any more: all comes to rest, and every charge is what is mapped."""
        for outsider in self.outsiders:
            outsider.wish(0)
        for filler in self.fillers:
            filler.refund(filler.charge_bytes)
        for memory in self.world.memories.values():
            memory.foreign_bytes = 0
        for engine in self.engines:
            for rank in engine.ranks:
                rank.faults.disarm()
            engine.quieten()
        for engine in self.engines:
            engine.check_quiet()
            for request in self.requests[engine]:
                engine.give(request)
            engine.memory.trim_soon = True
            engine.step(idle=True)
            engine.quieten()
            engine.check_quiet()
        self.world.check()
        for engine in self.engines:
            self.happened["growths"] += engine.memory.changes.made
            self.happened["refused by devices"] += engine.memory.changes.refused
            self.happened["refused by ledgers"] += engine.memory.refusals
            self.happened["misses"] += engine.misses
            self.happened["splits"] += engine.splits
            self.happened["staged splits"] += engine.staged
            self.happened["quarantined"] += any(engine.memory.changes.quarantined_bytes.values())
            self.happened["engines"] += 1
            self.happened["ranks"] += len(engine.ranks)


def run_schedule(seed: int, moves: int = 120) -> Counter[str]:
    """Run one; what happened in it."""
    carrying._PAUSE_SECONDS = 0.0
    directory = Path(tempfile.mkdtemp(prefix="kvtide-schedule-", dir="/dev/shm"))
    directory.chmod(0o700)
    try:
        schedule = Schedule(random.Random(seed), directory)
        try:
            schedule.run(moves)
            for engine in schedule.engines:
                engine.close()
            stuck = sum(
                rank.memory.arena.quarantined_bytes for e in schedule.engines for rank in e.ranks
            )
            assert sum(m.held_bytes for m in schedule.world.memories.values()) == stuck
        finally:
            for ledger in schedule.world.ledgers.values():
                ledger.close()
    finally:
        shutil.rmtree(directory)
    return schedule.happened


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--moves", type=int, default=120)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    happened: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(options.first, options.first + options.count):
        try:
            happened += run_schedule(seed, options.moves)
        except BaseException:
            print(f"schedule {seed} failed", file=sys.stderr)
            raise
    seconds = time.monotonic() - started
    print(f"{options.count} schedules from {options.first} of {options.moves} moves: no violation")
    print(f"{seconds:.0f} s; " + ", ".join(f"{k} {v}" for k, v in sorted(happened.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
