"""A batch that cannot be backed goes back as it was: fresh prompts, retracted ones, and a chunk."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from kvtide.engines.sglang import current, misses

MISS = "Out of memory. Try to lower your batch size.\nTry to allocate 5 tokens."


class Slot(int):
    def unsqueeze(self, _: int) -> Slot:
        return self


class Pool:
    def __init__(self) -> None:
        self.rows = [1, 2, 3, 4]
        self.states = [1, 2, 3, 4]
        self.mamba_allocator = SimpleNamespace(free=self.states.append)

    def free_rows(self, rows: list[int]) -> None:
        self.rows += rows


class Tree:
    def __init__(self, pool: Pool) -> None:
        self.locks: dict[str, int] = {}
        self.req_to_token_pool = pool

    def inc_lock_ref(self, node: str) -> str:
        self.locks[node] = self.locks.get(node, 0) + 1
        return f"receipt of {node}"

    def dec_lock_ref(self, node: str, receipt: str) -> None:
        assert receipt == f"receipt of {node}"
        self.locks[node] -= 1


class Kv:
    req_pool_idx = None
    mamba_pool_idx = None
    mamba_ping_pong_track_buffer = None
    mamba_cow_src_index = None
    mamba_needs_clear = False

    @property
    def holds_mamba(self) -> bool:
        return self.mamba_pool_idx is not None


def request(name: str, **more) -> SimpleNamespace:
    kv = Kv()
    values = {
        "name": name,
        "kv": kv,
        "last_node": None,
        "lock_receipt": None,
        "inflight_middle_chunks": 0,
        "extend_range": None,
        "is_retracted": False,
        "retraction_count": 0,
        "session": None,
        "to_finish": None,
        "beam_group": None,
        "origin_input_ids": [0] * 10,
        "output_ids": [0] * 5,
    }
    return SimpleNamespace(**(values | more))


class Scheduler:
    """Chooses all that wait, as SGLang does, and allocates for them."""

    def __init__(self, waiting: list, chunked=None) -> None:
        self.pool = Pool()
        self.tree_cache = Tree(self.pool)
        self.waiting_queue = waiting
        self.chunked_req = chunked
        self.fails: str | None = MISS
        self.error: type[Exception] = RuntimeError
        self.takes_state = False

    def choose(self, running_batch):
        batch = []
        if self.chunked_req is not None:
            self.chunked_req.extend_range = "the next chunk"
            self.chunked_req.inflight_middle_chunks += 1
            batch.append(self.chunked_req)
            self.chunked_req = None  # its last chunk
        for r in self.waiting_queue:
            r.last_node = f"node of {r.name}"
            r.lock_receipt = self.tree_cache.inc_lock_ref(r.last_node)
            r.extend_range = "all of it"
            if self.takes_state:
                r.kv.mamba_pool_idx = Slot(self.pool.states.pop())
                r.kv.mamba_cow_src_index = 7
            batch.append(r)
        new = self.waiting_queue[-1:]
        for r in new:
            self.chunked_req = r
            r.inflight_middle_chunks += 1
        self.waiting_queue = []
        made = SimpleNamespace(reqs=batch, req_to_token_pool=self.pool)
        misses.allocate_prompts(self.allocate, made)
        for r in batch:
            r.is_retracted = False
        return made, running_batch

    def allocate(self, batch) -> None:
        for r in batch.reqs:
            if r.kv.req_pool_idx is None:
                r.kv.req_pool_idx = self.pool.rows.pop()
        if self.fails:
            raise self.error(self.fails)


class Running:
    batch_is_full = False

    def __init__(self, reqs: int) -> None:
        self.reqs = reqs

    def is_empty(self) -> bool:
        return not self.reqs


def choose(scheduler: Scheduler, running: Running):
    return misses.choose_prompts(lambda s, **kw: s.choose(**kw), scheduler, running_batch=running)


def test_prompts_go_back_in_order_with_their_flags():
    fresh, retracted = request("fresh"), request("old", is_retracted=True, retraction_count=3)
    scheduler, running = Scheduler([fresh, retracted]), Running(1)
    assert choose(scheduler, running) == (None, running)
    assert scheduler.waiting_queue == [fresh, retracted]
    assert scheduler.chunked_req is None
    assert set(scheduler.tree_cache.locks.values()) == {0}
    assert sorted(scheduler.pool.rows) == [1, 2, 3, 4]
    assert (retracted.is_retracted, retracted.retraction_count) == (True, 3)
    assert [r.inflight_middle_chunks for r in (fresh, retracted)] == [0, 0]
    assert [r.kv.req_pool_idx for r in (fresh, retracted)] == [None, None]
    # What runs goes on; the prompts are looked at again when something has been freed.
    assert running.batch_is_full


def test_with_nothing_running_they_are_looked_at_in_the_next_round():
    running = Running(0)
    choose(Scheduler([request("a")]), running)
    assert not running.batch_is_full


def test_a_chunk_that_is_kept_stays_what_it_was():
    chunked = request("long", extend_range="the last chunk", inflight_middle_chunks=2)
    chunked.kv.req_pool_idx = 9
    other = request("other")
    scheduler = Scheduler([other], chunked)
    choose(scheduler, Running(1))
    assert scheduler.chunked_req is chunked
    assert (chunked.extend_range, chunked.inflight_middle_chunks) == ("the last chunk", 2)
    # Its slots stay its own: only what was taken for this batch is given back.
    assert chunked.kv.req_pool_idx == 9
    assert scheduler.waiting_queue == [other]
    assert sorted(scheduler.pool.rows) == [1, 2, 3, 4]


def test_states_that_were_taken_are_given_back():
    scheduler = Scheduler([request("a"), request("b")])
    scheduler.takes_state = True
    choose(scheduler, Running(1))
    assert sorted(scheduler.pool.states) == [1, 2, 3, 4]
    assert all(r.kv.mamba_cow_src_index is None for r in scheduler.waiting_queue)


def test_it_comes_through_when_memory_has_come():
    scheduler, running = Scheduler([request("a")]), Running(0)
    choose(scheduler, running)
    scheduler.fails = None
    batch, _ = choose(scheduler, running)
    assert [r.name for r in batch.reqs] == ["a"]
    assert scheduler.tree_cache.locks == {"node of a": 1}


def test_it_is_said_once_until_some_came_through(caplog, monkeypatch):
    monkeypatch.setattr(misses, "_told", False)
    caplog.set_level("INFO", "sglang.kvtide")
    scheduler, running = Scheduler([request("a")]), Running(0)
    for _ in range(3):
        choose(scheduler, running)
    assert len(caplog.records) == 1
    scheduler.fails = None
    choose(scheduler, running)
    scheduler.fails, scheduler.waiting_queue = MISS, [request("b")]
    choose(scheduler, running)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError, "Prefill out of memory. Try to lower your batch size."),
        (RuntimeError, "alloc_req_slots runs out of memory. Please set a smaller number"),
        (AssertionError, "Not enough space for mamba cache, try to increase"),
    ],
)
def test_what_sglang_says_of_a_miss(error, text):
    scheduler = Scheduler([request("a")])
    scheduler.error, scheduler.fails = error, text
    assert choose(scheduler, Running(0))[0] is None


def test_another_error_is_another_error():
    scheduler = Scheduler([request("a")])
    scheduler.fails = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        choose(scheduler, Running(0))


class Owing:
    """Chosen requests, and the ones that are let go first."""

    def __init__(self, due: int = 0, victims=()) -> None:
        self.due = due
        self.victims = set(victims)
        self.ordered = False

    @property
    def defers_prompts(self) -> bool:
        return self.due > 0

    def retracts(self, batch, selected) -> bool:
        return bool(self.victims if selected is None else self.victims & set(selected))

    @contextlib.contextmanager
    def in_order(self, batch):
        self.ordered = True
        yield


class Tide:
    def __init__(self, most: int, owing: Owing | None = None) -> None:
        self.most = most
        self.retraction = owing or Owing()

    def most_tokens(self) -> int:
        return self.most


def test_the_last_to_decode_is_retracted_too(monkeypatch):
    monkeypatch.setattr(current, "_tide", Tide(15))
    last = request("last")

    def give_up(batch):
        last.to_finish = "out of memory"
        return [], 0.5, [last]

    assert misses.retract(give_up, SimpleNamespace(reqs=[last])) == ([last], 0.5, [])
    assert last.to_finish is None


@pytest.mark.parametrize("why", ["never fits", "was ending", "beam"])
def test_one_that_cannot_come_back_is_given_up(monkeypatch, why):
    monkeypatch.setattr(current, "_tide", Tide(14 if why == "never fits" else 100))
    last = request("last", beam_group=1 if why == "beam" else None)
    if why == "was ending":
        last.to_finish = "aborted by its client"
    result = misses.retract(lambda _: ([], 0.5, [last]), SimpleNamespace(reqs=[last]))
    assert result == ([], 0.5, [last])


def test_no_prompt_begins_while_what_runs_makes_room(monkeypatch):
    monkeypatch.setattr(current, "_tide", Tide(100, Owing(due=3)))
    chunked, fresh, running = request("long"), request("fresh"), Running(1)
    scheduler = Scheduler([fresh], chunked)
    assert choose(scheduler, running) == (None, running)
    assert (scheduler.waiting_queue, scheduler.chunked_req) == ([fresh], chunked)
    assert not running.batch_is_full
    monkeypatch.setattr(current, "_tide", Tide(100))
    scheduler.fails = None
    assert choose(scheduler, running)[0] is not None


def test_it_does_not_fit_until_those_that_were_chosen_are_gone(monkeypatch):
    def fits(batch, selected_indices=None):
        return True

    monkeypatch.setattr(current, "_tide", Tide(100, Owing(due=3, victims=[1, 2])))
    assert not misses.decode_fits(fits, None)
    assert not misses.decode_fits(fits, None, selected_indices=[0, 1, 2])
    assert not misses.decode_fits(fits, None, [0, 2])
    assert misses.decode_fits(fits, None, selected_indices=[0])
    monkeypatch.setattr(current, "_tide", Tide(100, Owing(due=0, victims=[1])))
    assert misses.decode_fits(fits, None)
    assert not misses.decode_fits(lambda *_: False, None)
