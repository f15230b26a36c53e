"""The memory of one rank's pools: each has an arena and an account of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtide.device.base import Device
from kvtide.engines import family
from kvtide.engines.seats import find_seat
from kvtide.engines.sglang.buffers import (
    Answered,
    Buffer,
    geometry_of,
    layered,
    list_buffers,
    state_buffers,
)
from kvtide.engines.sglang.devices import open_rank_device, order_with
from kvtide.errors import KvtideError
from kvtide.pool import Geometry
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.seat import Seat
from kvtide.settings import Settings
from kvtide.units import format_size

__all__ = ["Part", "close_parts", "create_kv", "create_states", "part_of"]

_log = logging.getLogger("sglang.kvtide")


@dataclass(frozen=True, slots=True)
class Part:
    """One pool's memory in this rank."""

    name: str
    rank: int
    device: Device
    seat: Seat
    geometry: Geometry
    memory: RankMemory
    endpoint: Endpoint


# The pools of this process that lie in arenas, and their memory.
_parts: list[tuple[Any, Part]] = []
_device: Device | None = None


def part_of(pool: Any) -> Part | None:
    """The memory of a pool; None where it allocated its own."""
    return next((part for known, part in _parts if known is pool), None)


def create_kv(create: Callable[[], None], pool: Any) -> None:
    """Have a pool of keys and values make its buffers over an arena.

    `create` allocates them one by one and keeps them in the pool; nothing else is in it.
    """
    buffers = list_buffers(create)
    if not buffers:
        create()
        return
    pages = (pool.size + pool.page_size) // pool.page_size
    try:
        buffers = [layered(buffer, pool.size + pool.page_size, pages) for buffer in buffers]
    except KvtideError as error:
        family.end_server(error)
    _create(create, pool, buffers, pages, _name_of(pool))


def create_states(create: Callable[[], None], pool: Any, arguments: dict[str, Any]) -> None:
    """Have a pool of recurrent states make its buffers over an arena."""
    layers, size = len(arguments["mamba_layer_ids"]), arguments["size"]
    if not layers:
        create()
        return
    pool.device = arguments["device"]
    buffers = state_buffers(arguments["cache_params"], layers, size)
    _create(create, pool, buffers, size + 1, "state")


def _create(
    create: Callable[[], None], pool: Any, buffers: Sequence[Buffer], blocks_total: int, name: str
) -> None:
    try:
        part, offsets = _open(pool, buffers, blocks_total, name)
        with Answered(buffers, offsets, part.memory, _index(pool)) as answered:
            create()
        answered.check(name)
    except KvtideError as error:
        family.end_server(error)
    _parts.append((pool, part))
    _log.info(
        "kvtide: %s reserved for %d blocks of the %s pool, %s mapped",
        format_size(part.geometry.arena_bytes),
        blocks_total,
        name,
        format_size(part.memory.arena.mapped_bytes),
    )


def _name_of(pool: Any) -> str:
    """By what the pool is for, as SGLang labels it; a second one of a kind is numbered."""
    label = {"Full": "kv", "SWA": "window"}.get(str(pool.allocation_label), "kv")
    taken = [part.name for _, part in _parts]
    return label if label not in taken else f"{label}-{len(taken)}"


def _index(pool: Any) -> int:
    """torch's number of the pool's GPU; 0 on the host."""
    return torch.cuda.current_device() if torch.device(pool.device).type == "cuda" else 0


def _rank() -> int:
    # Of all: there is no other parallelism than that of tensors.
    return int(torch.distributed.get_rank())


def _open(
    pool: Any, buffers: Sequence[Buffer], blocks_total: int, name: str
) -> tuple[Part, list[int]]:
    global _device
    settings, rank = Settings.from_environ(), _rank()
    if _device is None:
        _device = open_rank_device(torch.device(pool.device).type, _index(pool), rank, settings)
    device = _device
    if device.info.backend != "host":
        order_with(device, torch.cuda.current_stream())
    geometry, offsets = geometry_of(buffers, blocks_total, device.info.granularity_bytes)
    seat = find_seat(settings, device.info)
    account = seat.ledger.enroll(
        seat.instance,
        pool_name=name,
        rank=rank,
        blocks_total=geometry.blocks_total,
        block_bytes=geometry.block_bytes,
        sampler=device.free_bytes,
    )
    memory = RankMemory(device, geometry.arena_bytes, account)
    endpoint = Endpoint(memory, seat, geometry, "per-layer", rank, settings.wait_deadline)
    endpoint.back_null_block()
    return Part(name, rank, device, seat, geometry, memory, endpoint), offsets


def close_parts() -> None:
    """Give everything back."""
    while _parts:
        _parts.pop()[1].endpoint.close()
