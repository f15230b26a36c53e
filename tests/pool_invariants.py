"""What must hold of pools, ranks and charges: for unit, property and fault tests alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtide.memory.arena import Arena
from kvtide.pool import Geometry, Pool
from kvtide.pool.extents import BLOCKED, COMING, LEAVING, MAPPED, NONE, Extents


def granules_of(geometry: Geometry, block: int) -> set[int]:
    """The granules that a block touches, straight from the definition of its strips."""
    size = geometry.granularity_bytes
    found = set()
    for offset, stride, length in geometry.strips:
        start = offset + block * stride
        found.update(range(start // size, (start + length - 1) // size + 1))
    return found


def granules_under(geometry: Geometry, blocks: Iterable[int]) -> set[int]:
    return {granule for block in blocks for granule in granules_of(geometry, block)}


def mapped_granules(arena: Arena, granularity_bytes: int) -> set[int]:
    """Of a rank's own arena; that nothing is mapped twice is the arena's own invariant too."""
    found: set[int] = set()
    for span in arena.extents:
        granules = set(
            range(span.offset_bytes // granularity_bytes, span.end_bytes // granularity_bytes)
        )
        assert not found & granules, "mapped twice"
        found |= granules
    return found


def assert_extents(extents: Extents) -> None:
    """Extents do not overlap, lie on mapped granules, and the sum of what is held is exact."""
    covered = np.zeros(len(extents._state), np.int64)
    for first, count in extents.mapped.items():
        assert count > 0
        covered[first : first + count] += 1
    assert covered.max(initial=0) <= 1, "two extents overlap"
    assert np.all(extents._state[covered == 1] == MAPPED)
    held = int(np.isin(extents._state, (COMING, MAPPED, LEAVING)).sum())
    assert extents.mapped_bytes == held * extents.granularity_bytes
    assert set(np.unique(extents._state)) <= {NONE, COMING, MAPPED, LEAVING, BLOCKED}


def assert_pool(pool: Pool) -> None:
    """The count is exact, and a usable block is backed by mapped granules in every shape."""
    usable = np.flatnonzero(pool.usable_mask())
    assert pool.usable_count == len(usable)
    for shape in pool.shapes:
        assert_extents(shape)
        for granule in granules_under(shape.geometry, usable.tolist()):
            assert shape._state[granule] == MAPPED, f"granule {granule} is not mapped"


def assert_circulation(pool: Pool, free: list[int], cached: list[int], live: list[int]) -> None:
    """Every usable block is in one place, and no other one is anywhere."""
    handed = [0, *free, *cached, *live]
    assert len(handed) == len(set(handed)), "a block is in two places"
    assert set(handed) == set(np.flatnonzero(pool.usable_mask()).tolist())


def assert_mapped_at(arena: Arena, geometry: Geometry, blocks: Iterable[int]) -> None:
    """No block is handed out that this rank has not mapped."""
    missing = granules_under(geometry, blocks) - mapped_granules(arena, geometry.granularity_bytes)
    assert not missing, f"granules {sorted(missing)} are not mapped at this rank"


def assert_quiet(arena: Arena, extents: Extents, charge_bytes: int, counted_bytes: int) -> None:
    """Nothing is under way: charged is what is mapped, and the scheduler knows its extents."""
    assert charge_bytes == arena.mapped_bytes + arena.quarantined_bytes
    assert counted_bytes == arena.mapped_bytes + arena.quarantined_bytes
    size = extents.granularity_bytes
    found = {s.offset_bytes // size: s.size_bytes // size for s in arena.extents}
    # What only some ranks could split is left alone where it is whole, and known to nobody.
    apart = {first: found[first] for first in found.keys() - extents.mapped.keys()}
    for first, count in apart.items():
        states = extents._state[first : first + count]
        assert np.all((states == BLOCKED) | (states == MAPPED))
    for first, count in extents.mapped.items():
        assert found.get(first) == count
