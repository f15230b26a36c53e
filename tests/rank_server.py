"""The scheduler's side of an engine whose ranks are processes of their own, on one host device."""

from __future__ import annotations

import os
import time

from kvtide.device.census import used_bytes
from kvtide.ledger import DeviceSpec, Ledger
from kvtide.pool import Pool, Run
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.ranks import Ranks
from kvtide.ranks.seat import Seat
from kvtide.units import MIB
from paper_device import GRANULE
from rank_process import RankProcess
from ranks_world import Blocks, layers

TOTAL = 512 * MIB
GEOMETRY = layers(100, 2 * MIB, 1)


class Server:
    """The scheduler's side of an engine whose ranks are processes, on one host device."""

    def __init__(self, directory, conducts):
        self.uuid = f"test-ranks-{os.getpid()}-{time.monotonic_ns()}"
        self.ledger = Ledger.open(
            directory, DeviceSpec(self.uuid, "host", "test", TOTAL, 0, None, GRANULE)
        )
        self.instance = self.ledger.register("engine", explicit=True)
        self.processes = [
            RankProcess(self.ledger, self.instance.key, rank, conduct)
            for rank, conduct in enumerate(conducts)
        ]
        self.ranks = Ranks([p.member(self.ledger) for p in self.processes])
        self.pool = Pool([GEOMETRY], 16 * MIB)
        self.blocks = Blocks(100)
        self.memory = GrowingMemory(
            {self.uuid: Seat(self.ledger, self.instance)},
            self.ranks,
            self.pool,
            self.blocks,
            16 * MIB,
        )
        self.memory.adopt([[Run(0, 1)]])

    def step(self):
        self.memory.settle()
        message = self.ranks.message()
        if message is not None:
            for process in self.processes:
                process.step(message)

    def quieten(self):
        deadline = time.monotonic() + 100
        while self.memory.pending:
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.002)

    def charges(self):
        return {
            pool.rank: (pool.charge_bytes, pool.mapped_bytes)
            for instance in self.ledger.snapshot().instances
            for pool in instance.pools
        }

    def close(self):
        for process in self.processes:
            process.close()
        self.memory.close()
        self.ledger.retire_dead()
        assert self.charges() == {}
        assert used_bytes(self.uuid) == 0
        self.instance.close()
        self.ledger.close()
