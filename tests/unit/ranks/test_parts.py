"""The small parts: patience, surplus, orders in bytes, sockets."""

import itertools
import os

import pytest

from kvtide.errors import KvtideError
from kvtide.pool import Run, Shrink, Split
from kvtide.ranks.patience import Backoff, Surplus
from kvtide.ranks.places import parting
from kvtide.ranks.sockets import RankSocket, SchedulerSocket


def test_a_backoff_doubles_to_a_bound_and_begins_anew_after_a_success():
    backoff, now, pauses = Backoff(), 100.0, []
    for _ in range(8):
        backoff.failed(now)
        start = now
        while not backoff.ready(now):
            now += 0.125
        pauses.append(now - start)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    backoff.failed(now)
    backoff.hurry()
    assert backoff.ready(now)
    backoff.succeeded()
    backoff.failed(now)
    assert not backoff.ready(now + 0.2)
    assert backoff.ready(now + 0.25)


def test_surplus_is_what_was_free_at_every_step_of_three_seconds():
    surplus, found = Surplus(), []
    for tenth in range(60):
        free = 7 if tenth == 25 else 50
        found.append(surplus.see(free, 10.0 + tenth / 10))
    told = [(tenth, blocks) for tenth, blocks in enumerate(found) if blocks]
    assert [blocks for _, blocks in told] == [50, 7, 7, 7]
    assert all(later - sooner >= 10 for (sooner, _), (later, _) in itertools.pairwise(told))


def test_a_split_is_ordered_in_bytes():
    split = Split(Run(64, 8), (Run(66, 1), Run(70, 2)))
    assert Shrink((Run(0, 64),), (split,)).granules == 64 + 5
    assert split.leaving() == [Run(64, 2), Run(67, 3)]
    assert parting(split, 2) == ((128, 16), ((132, 2), (140, 4)), ())


def test_messages_come_in_order_and_the_end_is_noticed():
    rank = RankSocket()
    assert not rank.send(b"too early")
    scheduler = SchedulerSocket(rank.address)
    for number in range(50):
        assert rank.send(b"%d" % number)
    assert scheduler.receive() == [b"%d" % number for number in range(50)]
    assert scheduler.receive() == []
    assert not scheduler.ended
    assert rank.send(b"last")
    rank.close()
    assert scheduler.receive() == [b"last"]
    assert scheduler.ended
    scheduler.close()


def test_a_socket_that_is_full_makes_nobody_wait():
    rank = RankSocket()
    scheduler = SchedulerSocket(rank.address)
    sent = 0
    while rank.send(bytes(4096)):
        sent += 1
        assert sent < 100_000
    assert len(scheduler.receive()) == sent
    assert rank.send(b"again")
    scheduler.close()
    rank.close()


def test_a_worker_that_is_gone_is_named():
    with pytest.raises(KvtideError, match=r"kvtide-rank-none.* cannot be reached"):
        SchedulerSocket(f"kvtide-rank-none-{os.getpid()}")
