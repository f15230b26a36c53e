"""Ranks in processes of their own, over real sockets: slow, refusing, and dying at every point."""

import pytest

from kvtide.errors import RankLostError
from paper_device import GRANULE
from rank_process import Conduct
from rank_server import Server


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
