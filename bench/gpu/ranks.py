"""A growth of 1 GiB a rank on real devices, against the slower rank's own time for it.

    python bench/gpu/ranks.py [--ranks 2]                on GPUs, one a rank
    python bench/gpu/ranks.py --cpu                      on host devices

Ranks are processes with a ledger a device, real sockets and real memory; the one that decides holds
no device. Times are from the decision to grow until the blocks are in circulation: planning, grants
for all ranks, the step's message, the ranks' calls, their answers. Some 15 seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from drive import save

from kvtide.bench.pairs import paired_ratios
from kvtide.bench.rig import SimpleCirculation, strips_of
from kvtide.device import open_device
from kvtide.engines.seats import spec_of
from kvtide.ledger import Ledger
from kvtide.memory.extents import cap_for
from kvtide.pool import Geometry, Pool, Run
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.links import SocketLink
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.messages import decode_description
from kvtide.ranks.ranks import Member, Ranks
from kvtide.ranks.seat import Seat
from kvtide.ranks.sockets import SchedulerSocket
from kvtide.settings import Settings
from kvtide.units import GIB, MIB

BLOCK_BYTES = 2 * MIB
_POLL_SECONDS = 20e-6
_MESSAGE = msgspec.msgpack.Decoder(dict[int, bytes])


def geometry_of(blocks: int, layers: int, granule: int) -> Geometry:
    """Four times as many blocks as a growth brings."""
    return Geometry.of(4 * blocks, strips_of(4 * blocks, BLOCK_BYTES, layers), granule)


def serve_rank(
    pipe: Connection, directory: Path, rank: int, blocks: int, layers: int, host_bytes: int
) -> None:
    """The process of one rank: what it is told in steps, it does, and says how long it took."""
    device = open_device(
        "host" if host_bytes else f"cuda:{rank}",
        host_total_bytes=host_bytes,
        host_uuid=f"{directory.name}-{rank}",
    )
    settings = Settings(dir=directory)
    ledger = Ledger.open(directory, spec_of(device.info, settings))
    instance = ledger.register("bench", explicit=True)
    geometry = geometry_of(blocks, layers, device.info.granularity_bytes)
    account = ledger.enroll(
        instance,
        pool_name="kv",
        rank=rank,
        blocks_total=geometry.blocks_total,
        block_bytes=geometry.block_bytes,
        sampler=device.free_bytes,
    )
    memory = RankMemory(device, geometry.arena_bytes, account)
    endpoint = Endpoint(memory, Seat(ledger, instance), geometry, "bench", rank, None)
    endpoint.back_null_block()
    pipe.send_bytes(endpoint.describe())
    with suppress(EOFError, ConnectionResetError):
        while said := pipe.recv_bytes():
            message = _MESSAGE.decode(said)
            started = time.perf_counter()
            endpoint.step(message, runs=True)
            pipe.send(time.perf_counter() - started)
            device.fence().wait()
            endpoint.step(None, runs=False)
    endpoint.close()
    instance.close()
    ledger.close()


def measure(
    ranks_count: int, layers: int, grow_bytes: int, repeats: int, host_bytes: int
) -> dict[str, Any]:
    """So many growths over all ranks, and what the slower one took of each."""
    directory = Path(tempfile.mkdtemp(prefix="kvtide-ranks-", dir="/dev/shm"))
    blocks = grow_bytes // BLOCK_BYTES
    context = multiprocessing.get_context("spawn")
    pipes, processes, members, seats, descriptions = [], [], [], {}, []
    for rank in range(ranks_count):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve_rank, args=(theirs, directory, rank, blocks, layers, host_bytes)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for rank, pipe in enumerate(pipes):
        told = decode_description(pipe.recv_bytes())
        descriptions.append(told)
        ledger = Ledger.attach(Path(told.ledger))
        seats[told.device_uuid] = Seat(ledger, ledger.instance(told.instance))
        link = SocketLink(rank, SchedulerSocket(told.socket))
        account = ledger.account(told.account)
        members.append(Member(rank, 0, told.device_uuid, account, link, told.pid))
    ranks = Ranks(members)
    first = descriptions[0]
    size = first.granularity_bytes
    cap = cap_for(first.device_bytes)
    geometry = geometry_of(blocks, layers, size)
    memory = GrowingMemory(
        seats, ranks, Pool([geometry], cap), SimpleCirculation(geometry.blocks_total), cap
    )
    memory.adopt([[Run(offset // size, length // size) for offset, length in first.extents]])

    def step() -> list[float]:
        message = ranks.message()
        assert message is not None
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(message))
        while memory.pending:
            time.sleep(_POLL_SECONDS)
            memory.settle()
        return [pipe.recv() for pipe in pipes]

    times, extents = [], 0
    for number in range(repeats + 1):
        before = len(memory.pool.shapes[0].mapped)
        started = time.perf_counter()
        assert memory.grow_for(blocks, blocks)
        own = step()
        # The answers of the ranks' own clocks come after the blocks are in circulation.
        took = time.perf_counter() - started
        extents = len(memory.pool.shapes[0].mapped) - before
        if number:
            times.append((took, max(own)))
        assert memory.trim()
        step()
    for pipe in pipes:
        pipe.send_bytes(b"")
    for member in members:
        member.link.close()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    for seat in seats.values():
        seat.ledger.close()
    shutil.rmtree(directory)
    ratios = paired_ratios(*zip(*times, strict=True))
    return {
        "ranks": ranks_count,
        "layers": layers,
        "extents": extents,
        "grow_mib": grow_bytes // MIB,
        **{f"ratio_{name}": ratio for name, ratio in ratios.items()},
        "median_ms": round(statistics.median(t for t, _ in times) * 1e3, 3),
        "median_slower_rank_ms": round(statistics.median(t for _, t in times) * 1e3, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    host_bytes = GIB if options.cpu else 0
    grow_bytes = 128 * MIB if options.cpu else GIB
    rows = [
        measure(options.ranks, layers, grow_bytes, options.repeats, host_bytes)
        for layers in (1, 32)
    ]
    for row in rows:
        print(row, flush=True)
    save("ranks" + ("-cpu" if options.cpu else ""), {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
