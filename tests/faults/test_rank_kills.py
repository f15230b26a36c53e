"""A rank in a process of its own dies or stops between any two steps of growing and giving."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
from points import Points

from kvtide.errors import RankLostError
from rank_process import Conduct
from rank_server import Server

KILLS = int(os.environ.get("KVTIDE_INTERNAL_RANK_KILLS", "150"))
PASSAGES = 2000


def drive(server: Server) -> bool:
    """Grow, give back, and grow again; whether the engine went on to the end."""
    try:
        for wanted in (8, 20, 5):
            server.memory.grow_for(wanted, wanted)
            server.quieten()
            taken = server.blocks.take(min(3, server.blocks.free.count))
            server.memory.trim()
            server.quieten()
            server.blocks.give(taken or [], cache=False)
    except RankLostError as lost:
        assert "rank 1" in str(lost)  # noqa: PT017 - the one that was killed is named
        return False
    return True


@pytest.mark.long
def test_a_rank_that_is_killed_at_any_point_ends_its_engine_and_leaves_nothing(tmp_path):
    seed = int(os.environ.get("KVTIDE_INTERNAL_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"seed {seed}, {KILLS} kills")
    dice = random.Random(seed)
    went_on = 0
    for n in range(KILLS):
        at = dice.randrange(PASSAGES)
        server = Server(
            tmp_path / f"ledgers-{n}", [Conduct(), Conduct(around=Points("kill", at).run)]
        )
        try:
            went_on += drive(server)
        finally:
            # What every engine does at its end; it asserts that nothing is charged or held.
            server.close()
    print(f"{KILLS} kills: {KILLS - went_on} engines ended, {went_on} were over before")
    assert KILLS - went_on >= KILLS // 4


def go_on(pid: int, over: threading.Event) -> None:
    while not over.wait(0.05):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_a_rank_that_is_stopped_anywhere_and_goes_on_loses_nothing(tmp_path):
    seed = random.randrange(1, 1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for n in range(KILLS // 5):
        server = Server(
            tmp_path / f"ledgers-{n}",
            [Conduct(), Conduct(around=Points("stop", dice.randrange(PASSAGES)).run)],
        )
        over = threading.Event()
        waker = threading.Thread(target=go_on, args=(server.ranks.members[1].pid, over))
        waker.start()
        try:
            server.memory.grow_for(20, 20)
            deadline = time.monotonic() + 100
            while server.memory.pending:
                assert time.monotonic() < deadline
                server.step()
                time.sleep(0.002)
            assert server.blocks.free.count >= 20
            assert len(set(server.charges().values())) == 1, "both ranks have the same"
        finally:
            server.close()
            over.set()
            waker.join()
