"""SGLang's own allocator and radix tree over elastic memory, without a server."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import random
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("sgl_kernel") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

import torch
from slot_world import World, sequence

from kvtide.engines.sglang.allocators import Conserving
from kvtide.engines.sglang.buffers import (
    Answered,
    Buffer,
    geometry_of,
    layered,
    list_buffers,
    state_buffers,
)
from kvtide.units import MIB

pytestmark = pytest.mark.torch

SEED = 20260


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
def world(request: pytest.FixtureRequest, tmp_path: Path):
    # Buffers of 2 KiB a token: 1024 tokens a granule, four of them.
    made = World(tmp_path, request.param, 16384 // request.param, 96 * MIB)
    yield made
    assert made.device.free_bytes() > 0
    made.close()


def test_only_what_is_backed_is_free(world: World) -> None:
    start = world.allocator.available_size()
    assert 0 < start < 1024 + world.page_size
    assert world.ensure(3000)
    assert world.allocator.available_size() >= 3000
    assert world.allocator.alloc(world.allocator.available_size() + world.page_size) is None
    world.check()
    world.memory.give_free()
    assert world.allocator.available_size() == start
    assert world.memory.part.memory.arena.mapped_bytes == 8 * MIB
    world.check()


def test_an_idle_cache_is_given_back_to_the_last_extent(world: World) -> None:
    source = random.Random(SEED)
    for _ in range(12):
        ids = sequence(source, 400, world.page_size)
        assert world.ensure(len(ids))
        world.cache(ids)
    world.check()
    held = world.part.memory.arena.mapped_bytes
    assert held >= 32 * MIB
    assert world.memory.give(held)
    world.check()
    # What lies beside the padding page stays mapped, and so does what is cached there.
    assert world.part.memory.arena.mapped_bytes == 8 * MIB


def test_whole_extents_go_the_oldest_first_and_no_more_than_is_wanted(world: World) -> None:
    source = random.Random(SEED)
    first, *others = [sequence(source, 900, world.page_size) for _ in range(5)]
    for ids in (first, *others):
        assert world.ensure(len(ids))
        world.cache(ids)
    world.memory.give_free()
    before = world.part.memory.arena.mapped_bytes
    # The first one was used last: it outlives those that came after it.
    world.matched(first)
    assert world.memory.give(1)
    given = before - world.part.memory.arena.mapped_bytes
    assert 2 * MIB <= given <= 8 * MIB
    assert len(world.matched(first)) == len(first)
    assert any(len(world.matched(ids)) < len(ids) for ids in others)
    world.check()


def test_a_locked_prefix_stays(world: World) -> None:
    source = random.Random(SEED)
    kept = sequence(source, 1500, world.page_size)
    assert world.ensure(3000)
    world.cache(kept)
    world.cache(sequence(source, 1000, world.page_size))
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    params = MatchPrefixParams(key=RadixKey(array("q", kept), None))
    node = world.tree.match_prefix(params).last_device_node
    lock = world.tree.inc_lock_ref(node)
    world.memory.give(1000)
    assert len(world.matched(kept)) == len(kept)
    world.tree.dec_lock_ref(node, lock.to_dec_params())
    world.check()


def test_flushing_leaves_what_is_backed_free(world: World) -> None:
    source = random.Random(SEED)
    assert world.ensure(2000)
    world.cache(sequence(source, 1800, world.page_size))
    world.tree.reset()
    world.allocator.clear()
    world.inserted.clear()
    assert world.memory.free == world.memory.pool.usable_count - 1
    world.check()
    world.memory.give_free()
    world.check()


def test_a_growth_that_another_rank_could_not_make_is_undone(world: World) -> None:
    before = world.part.memory.arena.mapped_bytes, world.memory.free, world.part.memory.places
    came = world.memory.try_growth(2000 // world.page_size)
    assert came is not None
    world.memory.undo_growth(came)
    world.check()
    assert (
        world.part.memory.arena.mapped_bytes,
        world.memory.free,
        world.part.memory.places,
    ) == before


@pytest.mark.parametrize("page_size", [1, 16])
def test_withheld_blocks_are_not_counted_but_conserved(tmp_path: Path, page_size: int) -> None:
    world = World(tmp_path, page_size, 16384 // page_size, 96 * MIB, ranks=2)
    free = world.allocator.available_size()
    world.allocator.withheld = 3
    assert world.allocator.available_size() == free - 3 * world.page_size
    with Conserving():
        assert world.allocator.available_size() == world.allocator.size
    assert world.allocator.available_size() == free - 3 * world.page_size
    world.close()


def test_the_count_of_one_rank_is_native_and_costs_what_native_costs(world: World) -> None:
    kind = type(world.allocator)
    assert kind.available_size is kind.__mro__[1].available_size
    with Conserving():
        assert world.allocator.available_size() == world.allocator.size
    assert kind.available_size is kind.__mro__[1].available_size


def test_what_must_stay_for_running_requests_stays(world: World) -> None:
    assert world.ensure(4000)
    world.memory.sharing.floor = 3000 // world.page_size
    world.memory.give(1000)
    assert world.memory.free >= 3000 // world.page_size
    world.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_work_keeps_every_token_where_it_belongs(world: World, seed: int) -> None:
    print(f"seed {SEED + seed}")
    source = random.Random(SEED + seed)
    prefixes = [sequence(source, 300, world.page_size) for _ in range(3)]
    for _ in range(40):
        choice = source.random()
        if choice < 0.6:
            ids = sequence(source, source.randint(20, 600), world.page_size)
            if source.random() < 0.5:
                ids = source.choice(prefixes) + ids
            if not world.ensure(len(ids)):
                world.memory.give(source.randint(1, 8))
                if not world.ensure(len(ids)):
                    continue
            world.cache(ids)
        elif choice < 0.8:
            world.memory.give(source.randint(1, 12))
        else:
            world.memory.give_free()
        world.check()


def test_a_pool_whose_buffers_are_asked_for_otherwise_is_refused(world: World) -> None:
    from kvtide.errors import UnsupportedError

    buffers = list_buffers(lambda: [torch.zeros((4, 2), dtype=torch.int8) for _ in range(2)])
    assert [b.shape for b in buffers] == [(4, 2), (4, 2)]
    with Answered(buffers, [0, 4096], world.part.memory, 0) as answered:
        torch.zeros((4, 2), dtype=torch.int8)
        torch.zeros((5, 2), dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="did not ask for 1 of the buffers"):
        answered.check("kv")


@pytest.mark.parametrize(
    ("shape", "slots", "pages", "axis"),
    [
        ((101, 8, 64), 101, 101, 0),
        ((1616, 8, 64), 1616, 101, 0),
        ((101, 8, 16, 64), 1616, 101, 0),
        ((2, 1616, 8, 64), 1616, 101, 1),
        ((2, 101, 8, 16, 64), 1616, 101, 1),
    ],
    ids=["slots", "paged", "pages", "halves", "halves of pages"],
)
def test_where_the_rows_of_a_buffer_lie(shape, slots, pages, axis) -> None:
    buffer = layered(Buffer(shape, torch.float32), slots, pages)
    assert buffer.axis == axis
    geometry, _ = geometry_of([buffer], pages, 2 * MIB)
    assert len(geometry.strips) == buffer.layers
    assert geometry.block_bytes * pages == buffer.size_bytes


def test_a_buffer_of_another_shape_is_refused() -> None:
    from kvtide.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="a layout that kvtide does not know"):
        layered(Buffer((8, 64, 101), torch.float32), 101, 101)


def test_states_of_one_layer_or_several_and_parts_of_no_size() -> None:
    shape = SimpleNamespace(conv=[(256, 2), (16, 2)], temporal=(0, 4))
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32)
    parameters = SimpleNamespace(shape=shape, dtype=dtype)
    for layers in (1, 3):
        geometry, offsets = geometry_of(state_buffers(parameters, layers, 9), 10, 2 * MIB)
        assert len(geometry.strips) == 2 * layers
        assert geometry.block_bytes == layers * (256 + 16) * 2 * 2
        assert len(offsets) == 3


class Chosen(Exception):  # noqa: N818 - where a round of SGLang's would go on
    """The part of a round that a test is about is over."""


def test_an_idle_engine_pays_a_refund_that_found_the_ledger_busy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no other change that would pay it, and its neighbours lack that memory."""
    from kvtide.engines.sglang import tide as tide_module

    memory, alarms = world.memory, []
    before = world.ledger.snapshot().charged_bytes
    assert world.ensure(3000)
    tide = tide_module.Tide.__new__(tide_module.Tide)
    tide.memories, tide._scheduler = {"full": memory}, SimpleNamespace(is_fully_idle=lambda: True)
    tide._sleeper = SimpleNamespace(watch=SimpleNamespace(alarm=alarms.append))
    tide._agreement = None
    lock = os.open(world.ledger.path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    memory.give_free()
    tide.idle()
    os.close(lock)
    assert world.ledger.snapshot().charged_bytes > before
    assert alarms, "nothing would ever make it pay"

    def chosen(*_: object) -> None:
        raise Chosen

    monkeypatch.setattr(tide_module, "read_load", chosen)
    with pytest.raises(Chosen):
        tide.begin(None)
    assert world.ledger.snapshot().charged_bytes == before
    alarms.clear()
    tide.idle()
    assert not alarms
