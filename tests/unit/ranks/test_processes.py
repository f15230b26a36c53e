"""Ranks in processes of their own, over real sockets: slow, refusing, and dying at every point."""

import os
import time

import pytest

from kvtide.device.census import used_bytes
from kvtide.errors import RankLostError
from kvtide.ledger import DeviceSpec, Ledger
from kvtide.pool import Pool, Run
from kvtide.ranks.elastic import ElasticMemory
from kvtide.ranks.ranks import Ranks
from kvtide.ranks.seat import Seat
from kvtide.units import MIB
from paper_device import GRANULE
from rank_process import Conduct, RankProcess
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
        self.memory = ElasticMemory(
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


@pytest.fixture
def start(tmp_path):
    servers = []

    def make(*conducts):
        servers.append(Server(tmp_path / f"ledgers-{len(servers)}", conducts))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_one_message_a_rank_and_one_outcome(start, count):
    # The ranks answer at very different times; the last one is slower by two hundred times.
    server = start(*[Conduct()] * (count - 2), Conduct(0.001), Conduct(0.2))
    assert server.memory.grow_for(10, 10)
    server.quieten()
    assert server.blocks.free.count == 10
    assert [p.messages for p in server.processes] == [1] * count
    assert server.charges() == dict.fromkeys(range(count), (11 * GRANULE, 11 * GRANULE))
    server.memory.trim()
    server.quieten()
    assert [p.messages for p in server.processes] == [2] * count
    assert server.charges() == dict.fromkeys(range(count), (GRANULE, GRANULE))


def test_a_refusal_at_one_rank_is_undone_at_all(start):
    server = start(Conduct(), Conduct(refuse_from=3))
    assert server.memory.grow_for(30, 30)
    server.quieten()
    assert server.memory.changes.refused == 1
    assert server.blocks.free.count == 0
    assert server.charges() == dict.fromkeys(range(2), (GRANULE, GRANULE))


@pytest.mark.parametrize("call", [0, 1, 4, 7])
def test_a_rank_that_dies_while_it_maps_ends_the_engine_and_leaves_nothing(start, call):
    server = start(Conduct(), Conduct(crash_at=call))
    assert server.memory.grow_for(30, 30)
    with pytest.raises(RankLostError, match="rank 1"):
        server.quieten()
    assert server.blocks.free.count == 0


def test_a_rank_that_dies_before_its_step_comes_is_noticed(start):
    server = start(Conduct(), Conduct())
    server.processes[0].kill()
    assert server.memory.grow_for(30, 30)
    with pytest.raises(RankLostError, match="rank 0"):
        server.quieten()
