"""What `kvtide status --json` says: a stable structure over the ledgers' snapshots."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtide.ledger import InstanceView, Ledger, PoolView, Snapshot, State

__all__ = ["DeviceStatus", "InstanceStatus", "PoolStatus", "Status", "device_status", "observe"]


class PoolStatus(msgspec.Struct, frozen=True):
    """The blocks of one rank. Sizes in bytes; `pid` is the process that holds the memory.

    `key`, here and of an instance, is its place in the ledger and the generation of that.
    """

    name: str
    rank: int
    pid: int
    block_bytes: int
    blocks_total: int
    blocks_mapped: int
    blocks_used: int
    blocks_cached: int
    extents: int
    key: str = ""


class InstanceStatus(msgspec.Struct, frozen=True):
    """One engine on one device. `state`: starting, running, sleeping, waiting or dead.

    What is mapped is in use by requests, cached, idle, or quarantined. `waiting_bytes` is what it
    lacks, `loading_bytes` what it will yet take beside KV caches, and `non_kv_bytes` what it has
    taken. `limit_revision` is of all its terms. `silent`: it does not answer calls to give back.
    """

    name: str
    state: str
    charged_bytes: int
    mapped_bytes: int
    limit_bytes: int | None
    limit_revision: int
    pools: tuple[PoolStatus, ...]
    key: str = ""
    pid: int = 0
    used_bytes: int = 0
    cached_bytes: int = 0
    idle_bytes: int = 0
    quarantined_bytes: int = 0
    pinned_bytes: int = 0
    waiting_bytes: int = 0
    min_bytes: int = 0
    backed_min_bytes: int = 0
    priority: int = 0
    headroom_bytes: int = 0
    headroom_taken_bytes: int = 0
    non_kv_bytes: int = 0
    loading_bytes: int = 0
    silent: bool = False


class DeviceStatus(msgspec.Struct, frozen=True):
    """One device. `free_bytes` is what could be granted now, `lendable_bytes` what instances would
    give on top to one that needs it: what they cache or have mapped idly.

    `outside_bytes` is what others hold: neither KV caches, nor what instances are known to hold
    beside them. On the host device instances hold only KV caches.
    """

    device: str
    backend: str
    total_bytes: int
    margin_bytes: int
    budget_bytes: int
    charged_bytes: int
    free_bytes: int
    instances: tuple[InstanceStatus, ...]
    name: str = ""
    outside_bytes: int = 0
    lendable_bytes: int = 0


class Status(msgspec.Struct, frozen=True):
    """All devices that have a ledger in one directory."""

    devices: tuple[DeviceStatus, ...]


def observe(directory: Path) -> Status:
    """Look at every ledger of a directory, without taking a lock; none is no error.

    Raises
    ------
    LedgerError
        A ledger or the directory cannot be trusted or read, or keeps changing.
    """
    devices = []
    for path in Ledger.existing(directory):
        with Ledger.read(path) as observer:
            devices.append(device_status(observer.snapshot()))
    return Status(devices=tuple(devices))


def device_status(snapshot: Snapshot, outside_now_bytes: int | None = None) -> DeviceStatus:
    """One ledger's snapshot in the shape that is promised.

    Parameters
    ----------
    snapshot
        Of the ledger.
    outside_now_bytes
        What no pool holds as the driver or kernel counts it now; by default as the ledger knows
        it from its last sample.
    """
    spec = snapshot.spec
    return DeviceStatus(
        device=spec.uuid,
        backend=spec.backend,
        total_bytes=spec.total_bytes,
        margin_bytes=spec.margin_bytes,
        budget_bytes=snapshot.budget_bytes,
        charged_bytes=snapshot.charged_bytes,
        free_bytes=snapshot.free_bytes,
        instances=tuple(map(_instance, snapshot.instances)),
        name=spec.name,
        outside_bytes=_outside_bytes(snapshot, outside_now_bytes),
        lendable_bytes=sum(
            pool.figures.idle_bytes
            for instance in snapshot.instances
            if not instance.silent and instance.state is not State.DEAD
            for pool in instance.pools
        ),
    )


def _outside_bytes(snapshot: Snapshot, now_bytes: int | None) -> int:
    taken_bytes = _sampled_outside_bytes(snapshot) if now_bytes is None else now_bytes
    if snapshot.spec.backend == "host":
        return taken_bytes
    known_bytes = sum(_non_kv_bytes(instance) for instance in snapshot.instances)
    return max(0, taken_bytes - known_bytes)


def _non_kv_bytes(instance: InstanceView) -> int:
    return instance.non_kv_bytes or min(instance.loaded_bytes, instance.reserved_bytes)


def _sampled_outside_bytes(snapshot: Snapshot) -> int:
    spec = snapshot.spec
    if snapshot.sampled_ns == 0:
        return 0
    if snapshot.budget_bytes < spec.ceiling_bytes:
        # The budget is what KV caches held at the sample and what was free, less the margin and
        # what is still to be loaded.
        loading_bytes = sum(instance.loading_bytes for instance in snapshot.instances)
        lent_bytes = spec.margin_bytes + snapshot.budget_bytes + loading_bytes
        return max(0, spec.total_bytes - lent_bytes)
    mapped_bytes = sum(instance.mapped_bytes for instance in snapshot.instances)
    return max(0, spec.total_bytes - snapshot.free_sampled_bytes - mapped_bytes)


def _instance(instance: InstanceView) -> InstanceStatus:
    pools = instance.pools
    used_bytes = sum(p.figures.blocks_used * p.block_bytes for p in pools)
    cached_bytes = sum(p.figures.blocks_cached * p.block_bytes for p in pools)
    quarantined_bytes = sum(p.figures.quarantined_bytes for p in pools)
    mapped_bytes = instance.mapped_bytes
    # Figures and records are read one after the other: never more parts than there is.
    used_bytes = min(used_bytes, mapped_bytes)
    cached_bytes = min(cached_bytes, mapped_bytes - used_bytes)
    quarantined_bytes = min(quarantined_bytes, mapped_bytes - used_bytes - cached_bytes)
    return InstanceStatus(
        name=instance.name,
        state=instance.state.value,
        charged_bytes=instance.charged_bytes,
        mapped_bytes=mapped_bytes,
        limit_bytes=instance.limit_bytes,
        limit_revision=instance.limit_revision,
        pools=tuple(map(_pool, pools)),
        key=instance.key,
        pid=instance.pid,
        used_bytes=used_bytes,
        cached_bytes=cached_bytes,
        idle_bytes=mapped_bytes - used_bytes - cached_bytes - quarantined_bytes,
        quarantined_bytes=quarantined_bytes,
        pinned_bytes=sum(p.figures.pinned_bytes for p in pools),
        waiting_bytes=instance.wish_bytes,
        min_bytes=instance.terms.min_bytes,
        backed_min_bytes=instance.backed_min_bytes,
        priority=instance.terms.priority,
        headroom_bytes=instance.terms.headroom_bytes,
        headroom_taken_bytes=instance.headroom_taken_bytes,
        non_kv_bytes=_non_kv_bytes(instance),
        loading_bytes=instance.loading_bytes,
        silent=instance.silent,
    )


def _pool(pool: PoolView) -> PoolStatus:
    return PoolStatus(
        name=pool.name,
        rank=pool.rank,
        pid=pool.pid,
        block_bytes=pool.block_bytes,
        blocks_total=pool.blocks_total,
        blocks_mapped=pool.figures.blocks_mapped,
        blocks_used=pool.figures.blocks_used,
        blocks_cached=pool.figures.blocks_cached,
        extents=pool.figures.extents,
        key=pool.key,
    )
