"""Growing and giving back a pool, against the raw verbs of its device on the same extents."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.bench.rig import Rig, open_rig, strips_of
from kvtide.device.base import Device
from kvtide.memory.extents import Span
from kvtide.observe.tallies import read_tally
from kvtide.units import MIB

__all__ = ["measure_excess", "measure_growth", "measure_single"]

_GROWING = ("create", "map", "zero")


def _floor(device: Device, base: int, spans: Sequence[Span]) -> tuple[float, float]:
    """Seconds to create and map these extents from an address on, and to unmap and release them."""
    create, map_, unmap, release = device.create, device.map, device.unmap, device.release
    start = time.perf_counter()
    handles = []
    for offset, size in spans:
        handle = create(size)
        assert handle is not None
        map_(base + offset, handle)
        handles.append((base + offset, handle))
    grown = time.perf_counter()
    for at, handle in handles:
        unmap(at, handle)
        release(handle)
    return grown - start, time.perf_counter() - grown


def measure_growth(
    device: Device, *, layers: int, block_bytes: int, grow_bytes: int, repeats: int
) -> dict[str, Any]:
    """Grow by so many bytes on demand, and give back: the product and the floor in turns.

    The product's time covers planning, the ledger's grant, the driver's calls, the launch of the
    zeroing and the blocks' way into circulation. `parts_ms` has the mean of what each kind of call
    of the device took of it, and all else.
    """
    blocks = grow_bytes // block_bytes
    total = 4 * blocks
    product: list[float] = []
    floor: list[float] = []
    shrink: list[float] = []
    shrink_floor: list[float] = []
    spans: list[Span] = []
    with open_rig(device, total, strips_of(total, block_bytes, layers)) as rig:
        before = set(rig.rank.arena.extents)
        # Of the same size, since what a mapping costs depends on where it lies.
        size_bytes = rig.rank.arena.size_bytes
        reserve = device.reserve(size_bytes)
        for number in range(repeats + 1):
            start = time.perf_counter()
            done = rig.memory.grow_for(blocks, blocks)
            grown = time.perf_counter() - start
            assert done
            spans = [e for e in rig.rank.arena.extents if e not in before]
            device.fence().wait()
            start = time.perf_counter()
            rig.memory.trim()
            gone = time.perf_counter() - start
            raw_grown, raw_gone = _floor(device, reserve, spans)
            if not number:  # the first one warms up
                spent_before = _spent(rig)
            else:
                product.append(grown)
                shrink.append(gone)
                floor.append(raw_grown)
                shrink_floor.append(raw_gone)
        device.unreserve(reserve, size_bytes)
        spent = {verb: _spent(rig)[verb] - spent_before[verb] for verb in _GROWING}
    parts = {verb: seconds / repeats for verb, seconds in spent.items()}
    parts["else"] = statistics.mean(product) - sum(parts.values())
    ratios = [p / f for p, f in zip(product, floor, strict=True)]
    return {
        "layers": layers,
        "grow_mib": grow_bytes // MIB,
        "extents": len(spans),
        "largest_extent_mib": max(span.size_bytes for span in spans) // MIB,
        "product_ms": _spread(product, 1e3),
        "floor_ms": _spread(floor, 1e3),
        "ratio": _spread(ratios, 1.0),
        "parts_ms": {part: round(seconds * 1e3, 4) for part, seconds in parts.items()},
        "shrink_ms": _spread(shrink, 1e3),
        "shrink_floor_ms": _spread(shrink_floor, 1e3),
    }


def _spent(rig: Rig) -> dict[str, float]:
    """Seconds of the rank in each of its device's calls so far."""
    reading = read_tally(rig.tally)
    assert reading is not None
    times = reading.times
    return {verb: times[verb].sum_ns * 1e-9 if verb in times else 0.0 for verb in _GROWING}


def measure_excess(
    device: Device, *, block_bytes: int, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Memory mapped beyond what the blocks in use need, as they are taken one at a time."""
    total = 2 * max(counts)
    rows: list[dict[str, Any]] = []
    with open_rig(device, total, strips_of(total, block_bytes, 1)) as rig:
        held: list[Any] = []
        take = _taker(rig)
        for count in counts:
            while len(held) < count:
                held += take(1)
            mapped = rig.rank.arena.mapped_bytes
            needed = (count + 1) * block_bytes
            rows.append(
                {
                    "blocks": count,
                    "mapped_mib": mapped / MIB,
                    "excess_mib": (mapped - needed) / MIB,
                    "excess_share": (mapped - needed) / needed,
                }
            )
        rig.circulation.free.give(held)
        rig.memory.trim()
        rows.append(
            {
                "blocks": "after all are freed",
                "mapped_mib": rig.rank.arena.mapped_bytes / MIB,
                "excess_mib": (rig.rank.arena.mapped_bytes - block_bytes) / MIB,
            }
        )
    return rows


def measure_single(device: Device, *, block_bytes: int, blocks: int) -> dict[str, Any]:
    """Take blocks one at a time, as decoding does: microseconds of one allocation."""
    times = []
    with open_rig(device, 2 * blocks, strips_of(2 * blocks, block_bytes, 1)) as rig:
        take = _taker(rig)
        for _ in range(blocks):
            start = time.perf_counter()
            take(1)
            times.append(time.perf_counter() - start)
        extents = len(rig.rank.arena.extents)
    times.sort()
    return {
        "blocks": blocks,
        "extents": extents,
        "p50_us": times[len(times) // 2] * 1e6,
        "p99_us": times[len(times) * 99 // 100] * 1e6,
        "p999_us": times[len(times) * 999 // 1000] * 1e6,
        "max_us": times[-1] * 1e6,
    }


def _taker(rig: Rig) -> Callable[[int], list[Any]]:
    free, grow = rig.circulation.free, rig.memory.grow

    def take(count: int) -> list[Any]:
        if free.count < count:
            assert grow(count)
        return free.take(count)

    return take


def _spread(values: Sequence[float], scale: float) -> dict[str, float]:
    ordered = sorted(v * scale for v in values)
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }
