"""Whether one request can ever be held: the longest when an engine starts, others as they wait."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any, NoReturn

from kvtide.engines import family
from kvtide.engines.vllm.eras import read_layout
from kvtide.errors import NeverFitsError
from kvtide.pool import Geometry
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.seat import Seat
from kvtide.settings import Settings
from kvtide.sizing.capacity import host_capacity
from kvtide.units import GIB, MIB, format_size

__all__ = [
    "check_longest",
    "fits_regrouped",
    "least_bytes",
    "most_bytes",
    "why_never",
    "wrap_sizing",
]

_GRANULARITY_BYTES = 2 * MIB
_LARGEST_BYTES = 1 << 50


def least_bytes(geometry: Geometry, blocks: int) -> int:
    """Bytes that must be mapped of one rank so that a request has so many blocks, beside block 0.

    The blocks are the lowest: no others take less.
    """
    end_block = min(blocks + 1, geometry.blocks_total)
    granules = covered = 0
    for first, end in sorted(geometry.granule_runs(0, end_block)):
        granules += max(0, end - max(first, covered))
        covered = max(covered, end)
    return granules * geometry.granularity_bytes


def most_bytes(seat: Seat) -> int:
    """Bytes that an instance may ever hold of a device, when all others have left."""
    limit_bytes = seat.instance.limit_bytes
    ceiling_bytes = seat.ledger.spec.ceiling_bytes
    return ceiling_bytes if limit_bytes is None else min(limit_bytes, ceiling_bytes)


def blocks_of_longest(config: Any, kv_cache_config: Any) -> int:
    """Blocks that one request of `max_model_len` tokens takes, all groups together."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return sum(-(-s.max_memory_usage_bytes(config) // s.page_size_bytes) for s in specs)


def check_longest(config: Any, kv_cache_config: Any, geometry: Geometry, seat: Seat) -> None:
    """Refuse a start whose longest request no state of the ledger could hold.

    Raises
    ------
    NeverFitsError
        Names the smallest size that works, and what stands against it.
    """
    blocks = blocks_of_longest(config, kv_cache_config)
    needed_bytes, allowed_bytes = least_bytes(geometry, blocks), most_bytes(seat)
    if needed_bytes <= allowed_bytes:
        return
    in_the_way, remedy = _obstacle(seat, needed_bytes)
    raise NeverFitsError(
        f"one request of {config.model_config.max_model_len} tokens (--max-model-len) takes "
        f"{blocks} blocks, which with the null block are {format_size(needed_bytes)} in extents "
        f"of {format_size(geometry.granularity_bytes)}, and {in_the_way}: {remedy}, or "
        "--max-model-len smaller"
    )


def _obstacle(seat: Seat, needed_bytes: int) -> tuple[str, str]:
    """What stands against an instance's having so much of a device, and what can be done."""
    spec, limit_bytes = seat.ledger.spec, seat.instance.limit_bytes
    if limit_bytes is not None and needed_bytes <= spec.ceiling_bytes:
        name = seat.instance.name
        return (
            f"the limit of {name} (KVTIDE_LIMIT, kvtide limit) is {format_size(limit_bytes)}",
            f"make it at least {_at_least(needed_bytes)}",
        )
    same = "the same for all engines of the device"
    lendable_bytes = spec.total_bytes - spec.margin_bytes
    if spec.budget_cap_bytes is not None and needed_bytes <= lendable_bytes:
        return (
            f"the budget of the device (KVTIDE_BUDGET) is {format_size(spec.budget_cap_bytes)}",
            f"make it at least {_at_least(needed_bytes)}, {same}",
        )
    if spec.backend == "host":
        total_bytes = needed_bytes + spec.margin_bytes
        remedy = f"make KVTIDE_HOST_MEMORY at least {_at_least(total_bytes)}, {same}"
    elif needed_bytes <= spec.total_bytes:
        most_mib = (spec.total_bytes - needed_bytes) // MIB
        remedy = f"make the margin at most {most_mib}MiB, {same}"
    else:
        remedy = "use a larger device, or more devices"
    return (
        f"the device {spec.uuid} less its margin (KVTIDE_MARGIN) is {format_size(lendable_bytes)}",
        remedy,
    )


def _at_least(size_bytes: int) -> str:
    """A size to be written into a setting: never rounded down."""
    return f"{-(-size_bytes // MIB)}MiB"


def fits_regrouped(memory: GrowingMemory[Any], blocks: int, missing: int) -> bool:
    """Whether so many blocks would fit into what an engine holds and may have now, side by side,
    and the `missing` ones do not fit into what it may have beside those that it has."""
    shapes, more = memory.pool.shapes, memory.bytes_to_grow(missing)
    apart = False
    for uuid, seat in memory.seats.items():
        members = [m for m in memory.ranks.members if m.device_uuid == uuid]
        needed_bytes = sum(least_bytes(shapes[m.shape].geometry, blocks) for m in members)
        charged_bytes = sum(m.account.charge_bytes for m in members)
        asked_bytes = max(0, needed_bytes - charged_bytes)
        room_bytes = seat.instance.obtainable_bytes(asked_bytes)
        allowed_bytes = min(charged_bytes + room_bytes, most_bytes(seat))
        if needed_bytes > allowed_bytes:
            return False
        apart |= more.get(uuid, 0) > allowed_bytes - charged_bytes
    return apart


def why_never(memory: GrowingMemory[Any], blocks: int) -> str | None:
    """Why an engine can never hold so many blocks beside block 0; None if it can.

    Its limit may be lower now than when it started.
    """
    shapes = memory.pool.shapes
    for uuid, seat in memory.seats.items():
        needed_bytes = sum(
            least_bytes(shapes[m.shape].geometry, blocks)
            for m in memory.ranks.members
            if m.device_uuid == uuid
        )
        if needed_bytes > most_bytes(seat):
            in_the_way, remedy = _obstacle(seat, needed_bytes)
            holders = ", ".join(
                f"{i.name} {format_size(i.charged_bytes)}" for i in seat.ledger.snapshot().instances
            )
            return (
                f"{format_size(needed_bytes)} of {uuid}, which can never be had: {in_the_way} "
                f"(held are {holders}): {remedy}, or send shorter requests (--max-model-len bounds "
                "them)"
            )
    return None


def wrap_sizing() -> None:
    """Turn vLLM's refusal of a capacity that is too small into one clear error."""
    from vllm.v1.engine import core

    original = core.get_kv_cache_configs

    @functools.wraps(original)
    def get_kv_cache_configs(config: Any, specs: Any, available: list[int]) -> Any:
        try:
            return original(config, specs, available)
        except ValueError:
            _refuse(original, config, specs, min(available))

    core.get_kv_cache_configs = get_kv_cache_configs


def _refuse(sizing: Any, config: Any, specs: Any, available_bytes: int) -> NoReturn:
    length = config.model_config.max_model_len
    found = _smallest(sizing, config, specs)
    if found is None:
        text = (
            f"vLLM finds no KV cache for requests of {length} tokens (--max-model-len) in "
            f"{format_size(available_bytes)}: make --max-model-len smaller"
        )
    else:
        smallest_bytes, configs = found
        text = (
            f"one request of {length} tokens (--max-model-len) takes a KV cache of at least "
            f"{format_size(smallest_bytes)}, and the capacity is {format_size(available_bytes)}: "
            f"{_remedy(config, smallest_bytes, configs)}, or make --max-model-len smaller"
        )
    family.end_server(NeverFitsError(text))


def _smallest(sizing: Any, config: Any, specs: Any) -> tuple[int, Any] | None:
    """The smallest capacity, to 64 KiB, that vLLM takes, and what it makes of it."""

    def attempt(size_bytes: int) -> Any:
        try:
            return sizing(copy.deepcopy(config), copy.deepcopy(specs), [size_bytes] * len(specs))
        except ValueError:
            return None

    # vLLM tells of every attempt, and only one was the user's.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        low, high = 0, MIB
        while (configs := attempt(high)) is None:
            low, high = high, 2 * high
            if high > _LARGEST_BYTES:
                return None
        while high - low > 64 << 10:
            middle = (low + high) // 2
            if (tried := attempt(middle)) is None:
                low = middle
            else:
                high, configs = middle, tried
    finally:
        logging.disable(before)
    return high, configs


def _remedy(config: Any, smallest_bytes: int, configs: Any) -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return "raise --gpu-memory-utilization or give --kv-cache-memory-bytes"
    geometries = [read_layout(c, _GRANULARITY_BYTES).geometry for c in configs]
    mapped_bytes = max(
        least_bytes(g, blocks_of_longest(config, c))
        for g, c in zip(geometries, configs, strict=True)
    )
    share = config.cache_config.gpu_memory_utilization
    settings = Settings.from_environ()
    if config.cache_config.kv_cache_memory_bytes != host_capacity(settings.host_memory, share):
        gib = -(-smallest_bytes * 100 // GIB) / 100
        return f"make VLLM_CPU_KVCACHE_SPACE or --kv-cache-memory-bytes at least {gib:.2f} GiB"
    total_bytes = max(mapped_bytes, smallest_bytes) // _GRANULARITY_BYTES * _GRANULARITY_BYTES
    while host_capacity(total_bytes, share) < smallest_bytes or total_bytes < mapped_bytes:
        total_bytes += _GRANULARITY_BYTES
    return (
        f"it is {share:g} (--gpu-memory-utilization) of KVTIDE_HOST_MEMORY, so make the latter at "
        f"least {format_size(total_bytes)}"
    )
