"""Which requests SGLang retracts for others, and that it is the chosen ones, without a server."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sgl_kernel") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

import torch
from slot_world import World, sequence

from kvtide.engines.sglang.retraction import Retraction
from kvtide.units import MIB

pytestmark = pytest.mark.torch

SEED = 20270


class Alone:
    """The agreement of one rank."""

    size = 1

    def gather(self, told: Any) -> list[Any]:
        return [told]


class Rows:
    """Requests that decode: a row of slots each."""

    def __init__(self, world: World, requests: int, longest: int) -> None:
        self.world = world
        self.req_to_token = torch.zeros((requests, longest), dtype=torch.int32)
        self.scheduler = SimpleNamespace(req_to_token_pool=self, page_size=world.page_size)
        self.requests: list[Any] = []

    def run(self, ids: list[int], *, shared: torch.Tensor | None = None) -> Any:
        """A request with slots of its own, behind those that it shares."""
        assert self.world.ensure(len(ids))
        own = self.world.allocator.alloc(len(ids))
        slots = own if shared is None else torch.cat((shared, own))
        row = len(self.requests)
        self.req_to_token[row, : len(slots)] = slots.to(torch.int32)
        kv = SimpleNamespace(req_pool_idx=row, kv_allocated_len=len(slots), holds_kv=True, own=own)
        request = SimpleNamespace(
            kv=kv, beam_group=None, to_finish=None, output_ids=[0] * row, name=row
        )
        self.requests.append(request)
        return request

    def end(self, request: Any) -> None:
        self.world.allocator.free(request.kv.own)
        request.kv.holds_kv = False


class Batch:
    """SGLang's, as far as it retracts: the least preferred at the end go first."""

    def __init__(self, rows: Rows) -> None:
        self.reqs, self.rows = rows.requests, rows

    def _get_decode_retraction_order(self, reqs: list[Any]) -> list[int]:
        return sorted(range(len(reqs)), key=lambda i: len(reqs[i].output_ids), reverse=True)

    def retract(self, fits: Any) -> list[Any]:
        order, gone = self._get_decode_retraction_order(self.reqs), []
        while len(order) > 1 and not fits(self, order):
            gone.append(self.reqs[order.pop()])
            self.rows.end(gone[-1])
        return gone


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def world(request: pytest.FixtureRequest, tmp_path: Path):
    # 512 bytes a token in each of four buffers: 4096... one granule of each holds 1024 tokens.
    made = World(tmp_path, request.param, 16384 // request.param, 96 * MIB)
    yield made
    made.close()


def running(world: World, count: int, tokens: int) -> tuple[Rows, Retraction]:
    source = random.Random(SEED)
    rows = Rows(world, count + 1, 2 * tokens + 64)
    for _ in range(count):
        rows.run(sequence(source, tokens, world.page_size))
    memory = world.memory
    return rows, Retraction(rows.scheduler, {"full": memory}, Alone())


def test_nothing_is_due_and_nobody_goes(world: World) -> None:
    rows, retraction = running(world, 3, 800)
    batch = Batch(rows)
    assert retraction.look(called=True) == (False, 0)
    assert not retraction.defers_prompts
    assert not retraction.retracts(batch, None)
    with retraction.in_order(batch):
        assert batch._get_decode_retraction_order(batch.reqs) == [2, 1, 0]


def test_what_a_neighbour_of_higher_priority_wishes_for_is_due(world: World) -> None:
    rows, retraction = running(world, 4, 2000)
    other = world.ledger.register("other", explicit=True)
    world.ledger.set_terms("other", lambda terms: terms._replace(priority=5), None)
    held = world.part.memory.arena.mapped_bytes
    assert held >= 32 * MIB
    other.wish(96 * MIB - held + 8 * MIB)
    owes, granules = retraction.look(called=True)
    assert owes
    assert granules > 0
    # Neither called nor due: it is not looked at again at once.
    assert retraction.look(called=False) == (False, 0)
    other.wish(0)
    assert retraction.look(called=True) == (False, 0)
    other.close()
    assert len(rows.requests) == 4


def test_the_chosen_ones_go_and_their_memory_with_them(world: World) -> None:
    rows, retraction = running(world, 8, 1000)
    batch, before = Batch(rows), world.part.memory.arena.mapped_bytes
    retraction.due = 8  # two columns of granules
    assert retraction.retracts(batch, None)
    assert retraction.defers_prompts

    def fits(batch: Batch, order: list[int]) -> bool:
        return not retraction.retracts(batch, order)

    with retraction.in_order(batch):
        gone = batch.retract(fits)
    assert 1 <= len(gone) < 8
    # They queue in the order in which they ran.
    assert [r.name for r in gone] == sorted(r.name for r in gone)
    assert not retraction.defers_prompts
    assert not hasattr(batch, "__dict__") or "_get_decode_retraction_order" not in vars(batch)
    world.memory.give(8)
    assert before - world.part.memory.arena.mapped_bytes >= 8 * 2 * MIB


def test_what_others_hold_too_does_not_count_for_a_request(world: World) -> None:
    source = random.Random(SEED)
    rows = Rows(world, 4, 8192)
    first = rows.run(sequence(source, 3000, world.page_size))
    # All of the first one's slots are the second one's as well: neither alone makes room with them.
    rows.run(sequence(source, 64, world.page_size), shared=first.kv.own)
    alone = rows.run(sequence(source, 3000, world.page_size))
    retraction = Retraction(rows.scheduler, {"full": world.memory}, Alone())
    retraction.due = 4
    retraction.retracts(Batch(rows), None)
    assert retraction._victims == [alone]


def test_none_that_could_go_ends_what_was_asked(world: World) -> None:
    rows, retraction = running(world, 2, 500)
    for request in rows.requests:
        request.to_finish = "it was aborted"
    retraction.due = 4
    assert not retraction.retracts(Batch(rows), None)
    assert not retraction.defers_prompts
