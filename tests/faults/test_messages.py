"""What comes by a socket is checked before it is believed: whole, in bounds, from the same user."""

import errno
import os
import random
import resource
import socket

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surroundings import Child, become, in_child

from kvtide.device.census import used_bytes
from kvtide.device.host import HostDevice
from kvtide.errors import KvtideError, LedgerError, MessageError
from kvtide.ledger import Ledger
from kvtide.ranks import sockets
from kvtide.ranks.links import SocketLink
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.messages import (
    Answer,
    Answers,
    Grow,
    Shrink,
    decode_answers,
    decode_description,
    decode_orders,
    encode,
)
from kvtide.ranks.sockets import RankSocket, SchedulerSocket
from kvtide.units import MIB
from ledger_world import enroll, spec

GRANULE = 2 * MIB
DECODERS = {
    "orders": decode_orders,
    "answers": decode_answers,
    "description": decode_description,
}
whole = st.integers(-(1 << 63), (1 << 64) - 1)
places = st.lists(st.tuples(whole, whole), max_size=4)
anything = st.recursive(
    st.none() | st.booleans() | whole | st.floats() | st.binary(max_size=20) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)
order_like = st.one_of(
    st.tuples(st.just("g"), whole, places),
    st.tuples(st.just("s"), whole, places, st.just([])),
    st.tuples(st.just("m"), whole),
    anything,
)
raw = st.one_of(
    st.binary(max_size=200),
    anything.map(msgspec.msgpack.encode),
    st.lists(order_like, max_size=4).map(msgspec.msgpack.encode),
    # Lengths that promise far more than comes: nothing may be set aside for them.
    st.sampled_from(
        [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff\x01"]
    ),
    st.just(b"\x91" * 100_000),
)


@pytest.mark.parametrize("what", DECODERS)
@settings(max_examples=200, deadline=None)
@given(message=raw)
def test_any_bytes_are_a_message_or_a_clear_refusal_and_take_no_memory(what, message):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        DECODERS[what](message)
    except MessageError as error:
        said = str(error)
    else:
        said = "cannot be understood"
    assert "cannot be understood" in said
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@settings(max_examples=150, deadline=None)
@given(message=raw, cut=st.integers(0, 60), flip=st.integers(0, 500), seed=st.integers(0, 99))
def test_a_good_message_that_was_cut_or_flipped_is_never_half_believed(message, cut, flip, seed):
    good = encode(Answers(3, (Answer(1, True), Answer(2, False, (4096,), 5, ((0, GRANULE),)))))
    spoiled = bytearray(good[: len(good) - cut % len(good)])
    dice = random.Random(seed)
    for _ in range(flip % 3):
        spoiled[dice.randrange(len(spoiled))] ^= 1 << dice.randrange(8)
    try:
        answers = decode_answers(bytes(spoiled))
    except MessageError:
        return
    for answer in answers.answers:
        assert 0 <= answer.stuck_bytes < 1 << 62
        assert all(0 <= n < 1 << 62 for place in answer.blocked for n in place)


class World:
    """A rank's memory on a host device, granted 4 of its 16 granules."""

    def __init__(self, directory) -> None:
        self.uuid = f"test-orders-{os.getpid()}-{random.randrange(1 << 30)}"
        self.device = HostDevice(64 * MIB, uuid=self.uuid)
        self.ledger = Ledger.open(directory, spec(uuid=self.uuid, total_bytes=64 * MIB))
        _, self.account = enroll(self.ledger, "a", self.device.free_bytes)
        self.memory = RankMemory(self.device, 16 * GRANULE, self.account)
        self.account.grant(4 * GRANULE)

    def close(self) -> None:
        self.memory.close()
        self.account.close()
        self.ledger.close()
        self.device.close()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path / "kv")
    yield world
    world.close()


def test_nothing_is_allocated_by_a_peers_word(world):
    """Only what the ledger has granted is created, whatever an order says."""
    memory = world.memory
    for extents in (
        ((0, 5 * GRANULE),),
        tuple((n * GRANULE, GRANULE) for n in range(16)),
        ((0, 1 << 50),),
        ((0, (1 << 62) - GRANULE),),
    ):
        (answer,) = memory.carry_out((Grow(1, extents),))
        assert not answer.done
        assert used_bytes(world.uuid) == 0
    (answer,) = memory.carry_out((Grow(2, ((0, 4 * GRANULE),)),))
    assert answer.done
    (answer,) = memory.carry_out((Grow(3, ((8 * GRANULE, GRANULE),)),))
    assert not answer.done, "beyond the grant"
    # A record that is gone grants nothing.
    memory.carry_out((Shrink(4, ((0, 4 * GRANULE),)),))
    world.ledger.file.words[world.account._at] += 1
    (answer,) = memory.carry_out((Grow(5, ((0, GRANULE),)),))
    assert not answer.done
    world.ledger.file.words[world.account._at] -= 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_orders_that_make_no_sense_change_nothing(data, tmp_path_factory):
    world = World(tmp_path_factory.mktemp("orders") / "kv")
    try:
        world.memory.carry_out((Grow(1, ((0, GRANULE), (GRANULE, GRANULE))),))
        offsets = st.sampled_from([0, 1, GRANULE, 15 * GRANULE, 16 * GRANULE, 1 << 61])
        extents = data.draw(st.lists(st.tuples(offsets, offsets), min_size=1, max_size=4))
        kind = data.draw(st.sampled_from([Grow, Shrink]))
        before = world.memory.places
        message = encode((kind(2, tuple(extents)),))
        try:
            answers = world.memory.carry_out(decode_orders(message))
        except (ValueError, MessageError):
            assert world.memory.places == before
        else:
            assert all(isinstance(answer, Answer) for answer in answers)
        held = world.memory.arena.mapped_bytes + world.memory.arena.quarantined_bytes
        assert used_bytes(world.uuid) == held <= world.account.charge_bytes
    finally:
        world.close()


# ---- sockets ----


def connected():
    rank = RankSocket()
    scheduler = SchedulerSocket(rank.address)
    assert rank.send(encode(Answers(0, ())))
    return rank, scheduler


@settings(max_examples=100, deadline=None)
@given(messages=st.lists(raw.filter(lambda m: 0 < len(m) < 1 << 16), min_size=1, max_size=5))
def test_a_scheduler_takes_any_datagrams_or_says_which_rank_speaks_nonsense(messages):
    rank, scheduler = connected()
    link = SocketLink(0, scheduler)
    assert link.receive() == []
    for message in messages:
        rank.send(message)
    try:
        answers = link.receive()
    except MessageError as error:
        assert "understood" in str(error) or "in place of" in str(error)  # noqa: PT017
    else:
        assert all(isinstance(answer, Answer) for answer in answers)
    link.close()
    rank.close()


def test_a_rank_that_answers_for_another_is_not_believed():
    rank, scheduler = connected()
    link = SocketLink(7, scheduler)
    with pytest.raises(MessageError, match="rank 0 answers in place of rank 7"):
        link.receive()
    link.close()
    rank.close()


def test_a_message_larger_than_any_is_cut_and_refused():
    rank, scheduler = connected()
    link = SocketLink(0, scheduler)
    link.receive()
    many = tuple(Answer(n, True, tuple(range(200))) for n in range(300))
    assert rank.send(encode(Answers(0, many)))
    with pytest.raises(MessageError):
        link.receive()
    link.close()
    rank.close()


def test_a_full_socket_and_a_peer_that_is_gone_keep_no_rank_waiting():
    rank, scheduler = connected()
    sent = sum(rank.send(b"x" * 1000) for _ in range(10_000))
    assert 0 < sent < 10_000, "it said that no more goes, and did not wait"
    assert len(scheduler.receive()) == sent + 1
    scheduler.close()
    assert not rank.send(b"more")
    assert not rank.send(b"more")
    rank.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_who_knocks_is_sent_away_and_the_engine_goes_on():
    rank = RankSocket()

    def knock() -> list[str]:
        become(4321)
        said = []
        knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        knocking.connect("\0" + rank.address)
        said.append(str(knocking.recv(10)))
        knocking.close()
        return said

    intruder = Child(knock)
    # Until it stands in the queue: its own name shows there.
    while rank._listener is not None and not _queued(rank):
        pass
    scheduler = SchedulerSocket(rank.address)
    assert rank.send(encode(Answers(0, (Answer(1, True),))))
    assert intruder.result() == ["b''"], "it was closed without a word"
    assert len(scheduler.receive()) == 1
    scheduler.close()
    rank.close()


def _queued(rank: RankSocket) -> bool:
    with open("/proc/net/unix") as file:  # noqa: PTH123
        return sum(rank.address in line for line in file) > 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_scheduler_does_not_talk_to_another_users_process():
    rank = RankSocket()

    def connect() -> str:
        become(4321)
        try:
            SchedulerSocket(rank.address)
        except KvtideError as error:
            return str(error)
        return "it talked"

    assert "another user's process" in in_child(connect)
    rank.close()


def test_a_worker_that_is_not_there_is_named_and_where_to_look():
    rank = RankSocket()
    address = rank.address
    rank.close()
    with pytest.raises(KvtideError, match=r"cannot be reached.*see its log"):
        SchedulerSocket(address)


def test_an_error_that_is_none_of_the_expected_is_not_swallowed(monkeypatch):
    rank = RankSocket()

    def broken(*_: object) -> tuple:
        raise OSError(errno.EBADF, "bad")

    class Listener:
        accept = broken

        def close(self) -> None: ...

    real, rank._listener = rank._listener, Listener()
    with pytest.raises(OSError, match="bad"):
        rank.send(b"x")
    real.close()
    assert sockets.MAX_MESSAGE_BYTES == 1 << 16


# ---- the wake channel ----


def test_a_flood_of_wake_ups_of_any_bytes_is_one_wake_up(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    instance, _ = enroll(ledger, "a")
    waker = instance.waker()
    (path,) = (p for p in ledger.path.parent.iterdir() if p.suffix == ".wake")
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    for size in (0, 1, 1000, 60_000):
        for _ in range(200):
            try:
                sender.sendto(os.urandom(size), str(path))
            except BlockingIOError:
                break
    assert waker.wait(60)
    assert not waker.wait(0), "all of them are one"
    sender.close()
    waker.close()
    ledger.close()
    with pytest.raises(LedgerError):
        instance.wish(1)
