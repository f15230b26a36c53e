"""What `kvtide status --json` says: a stable structure over the ledgers' snapshots."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtide.ledger import InstanceView, Ledger, PoolView, Snapshot

__all__ = ["DeviceStatus", "InstanceStatus", "PoolStatus", "Status", "device_status", "observe"]


class PoolStatus(msgspec.Struct, frozen=True):
    """The blocks of one rank. Sizes in bytes; `pid` is the process that holds the memory."""

    name: str
    rank: int
    pid: int
    block_bytes: int
    blocks_total: int
    blocks_mapped: int
    blocks_used: int
    blocks_cached: int
    extents: int


class InstanceStatus(msgspec.Struct, frozen=True):
    """One engine on one device. `state`: starting, running, sleeping, waiting or dead."""

    name: str
    state: str
    charged_bytes: int
    mapped_bytes: int
    limit_bytes: int | None
    limit_revision: int
    pools: tuple[PoolStatus, ...]


class DeviceStatus(msgspec.Struct, frozen=True):
    """One device. `free_bytes` is what could be granted now."""

    device: str
    backend: str
    total_bytes: int
    margin_bytes: int
    budget_bytes: int
    charged_bytes: int
    free_bytes: int
    instances: tuple[InstanceStatus, ...]


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


def device_status(snapshot: Snapshot) -> DeviceStatus:
    """One ledger's snapshot in the shape that is promised."""
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
    )


def _instance(instance: InstanceView) -> InstanceStatus:
    return InstanceStatus(
        name=instance.name,
        state=instance.state.value,
        charged_bytes=instance.charged_bytes,
        mapped_bytes=instance.mapped_bytes,
        limit_bytes=instance.limit_bytes,
        limit_revision=instance.limit_revision,
        pools=tuple(map(_pool, instance.pools)),
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
    )
