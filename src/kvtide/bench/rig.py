"""Elastic memory over a real device without an engine, for measurements."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.device.base import Device
from kvtide.engines.seats import spec_of
from kvtide.ledger import Ledger
from kvtide.memory.extents import cap_for
from kvtide.observe.tally import Owner
from kvtide.pool import FreeBlocks, Geometry, Pool, Strip
from kvtide.pool.plans import Run
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.links import DirectLink
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.ranks import Member, Ranks
from kvtide.ranks.seat import Seat
from kvtide.settings import Settings

__all__ = ["Rig", "SimpleBlock", "open_rig", "strips_of"]


class SimpleBlock:
    """A block with a number and nothing else."""

    __slots__ = ("block_id",)

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


class SimpleCirculation:
    """An engine's bookkeeping without a prefix cache."""

    cached_count = 0

    def __init__(self, blocks_total: int) -> None:
        self.blocks: Sequence[SimpleBlock] = [SimpleBlock(n) for n in range(blocks_total)]
        self.free: FreeBlocks[SimpleBlock] = FreeBlocks(blocks_total)

    def cached_ids(self) -> Sequence[int]:
        """None."""
        return ()

    def drop_cached(self, gone: npt.NDArray[np.bool_]) -> None:
        """There are none."""


@dataclass(frozen=True)
class Rig:
    """Elastic memory, its blocks, what is under it, and the file that its rank counts in."""

    memory: GrowingMemory[SimpleBlock]
    circulation: SimpleCirculation
    rank: RankMemory
    tally: Path


def strips_of(blocks_total: int, block_bytes: int, layers: int) -> list[Strip]:
    """A cache of so many equal layers; 1 is block-major."""
    page = block_bytes // layers
    return [Strip(layer * blocks_total * page, page, page) for layer in range(layers)]


@contextmanager
def open_rig(device: Device, blocks_total: int, strips: Sequence[Strip]) -> Iterator[Rig]:
    """Open elastic memory on a device, on a ledger of its own that is removed at the end."""
    info = device.info
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        settings = Settings(dir=directory)
        ledger = Ledger.open(directory, spec_of(info, settings))
        stack.callback(ledger.close)
        instance = ledger.register(f"bench-{os.getpid()}", explicit=True)
        geometry = Geometry.of(blocks_total, strips, info.granularity_bytes)
        account = ledger.enroll(
            instance,
            pool_name="kv",
            rank=0,
            blocks_total=blocks_total,
            block_bytes=geometry.block_bytes,
            sampler=device.free_bytes,
        )
        rank = RankMemory(device, geometry.arena_bytes, account)
        seat = Seat(ledger, instance)
        endpoint = Endpoint(rank, seat, geometry, "bench", 0, None)
        stack.callback(endpoint.close)
        endpoint.back_null_block()
        circulation = SimpleCirculation(blocks_total)
        cap_bytes = cap_for(info.total_bytes)
        members = [Member(0, 0, info.uuid, account, DirectLink(endpoint))]
        memory = GrowingMemory(
            {info.uuid: seat}, Ranks(members), Pool([geometry], cap_bytes), circulation, cap_bytes
        )
        size = info.granularity_bytes
        memory.adopt([[Run(offset // size, length // size) for offset, length in rank.places]])
        tally = Owner.of_key("rank", account.key).path(ledger.path)
        yield Rig(memory, circulation, rank, tally)
