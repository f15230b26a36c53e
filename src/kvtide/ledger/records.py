"""The values that go in and out of a ledger: plain, frozen, with their units in their names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

__all__ = [
    "DeviceSpec",
    "Granted",
    "InstanceView",
    "PoolFigures",
    "PoolView",
    "Refusal",
    "Snapshot",
    "State",
    "Terms",
]

NON_KV_SOURCES = ("", "driver", "torch", "given")


class State(Enum):
    """What an instance does, for observers; nothing is decided by it.

    `DEAD` is never written: it is what an instance is called whose lease the kernel has dropped.
    """

    STARTING = "starting"
    RUNNING = "running"
    SLEEPING = "sleeping"
    WAITING = "waiting"
    DEAD = "dead"


class Terms(NamedTuple):
    """What an instance was promised and may hold on a device.

    Attributes
    ----------
    limit_bytes
        Ceiling over all its pools and ranks; None: none.
    min_bytes
        What it can always get back: neighbours may borrow it.
    priority
        Lower gives way first; equal ones share.
    headroom_bytes
        What it wants left unclaimed on the device, by anybody.
    """

    limit_bytes: int | None = None
    min_bytes: int = 0
    priority: int = 0
    headroom_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device as its ledger describes it.

    `margin_bytes` are never lent, `budget_cap_bytes` caps what is; both are fixed by whoever
    creates the file.
    """

    uuid: str
    backend: str
    name: str
    total_bytes: int
    margin_bytes: int
    budget_cap_bytes: int | None
    granularity_bytes: int

    @property
    def ceiling_bytes(self) -> int:
        """The most that the budget can ever be."""
        lendable = max(0, self.total_bytes - self.margin_bytes)
        return lendable if self.budget_cap_bytes is None else min(lendable, self.budget_cap_bytes)


class PoolFigures(NamedTuple):
    """What a pool's owner tells others about it.

    Attributes
    ----------
    blocks_mapped, blocks_used, blocks_cached
        Blocks with memory behind them; of these in use by requests; cached and not in use.
    extents
        Handles mapped now.
    idle_bytes
        What the pool could give back now without preempting a request, and has not begun to.
    releasing_bytes
        What it has begun to give back and not yet refunded.
    pinned_bytes
        What it can never give back while it lives.
    quarantined_bytes
        What its device did not take back: charged, and of no use to anybody.
    """

    blocks_mapped: int
    blocks_used: int
    blocks_cached: int
    extents: int
    idle_bytes: int
    releasing_bytes: int = 0
    pinned_bytes: int = 0
    quarantined_bytes: int = 0


class Granted(NamedTuple):
    """The charge was raised by so many bytes: they may be created now."""

    granted_bytes: int


class Refusal(NamedTuple):
    """Nothing was charged.

    Attributes
    ----------
    reason
        `budget`: the device has no room; `limit`: the instance's ceiling; `busy`: the ledger stayed
        locked; `retired`: the record is gone, since its holder died or closed it.
    available_bytes
        What would have been granted.
    sample_is_stale
        A fresh sample by a worker might find more.
    """

    reason: Literal["budget", "limit", "busy", "retired"]
    asked_bytes: int
    available_bytes: int
    sample_is_stale: bool


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool's record. `live` is False when its holder has died and nobody retired it yet."""

    key: str
    name: str
    rank: int
    pid: int
    live: bool
    charge_bytes: int
    created_bytes: int
    released_bytes: int
    blocks_total: int
    block_bytes: int
    figures: PoolFigures

    @property
    def mapped_bytes(self) -> int:
        """Memory that the pool's holder has created and not released."""
        return self.created_bytes - self.released_bytes


@dataclass(frozen=True, slots=True)
class InstanceView:
    """One instance's record with its pools.

    Attributes
    ----------
    terms, revision
        What it was promised and may hold, and how often that was set.
    backed_min_bytes
        As much of its min as the budget backs now.
    wish_bytes, deadline_ns
        Its unmet need, and until when it waits, in monotonic time (0: for ever).
    reserved_bytes, loaded_bytes
        What it has announced to load beside its pools, and has loaded of that by now.
    non_kv_bytes, non_kv_source
        What it holds beside its pools, measured after its start: by `driver`, `torch`, or as it was
        `given`; empty before.
    silent
        It was called to give memory back and has not answered: it is passed over.
    headroom_taken_bytes
        Of its headroom, what it had taken for itself at its last sample: so much less is left free.
    """

    key: str
    name: str
    pid: int
    state: State
    terms: Terms
    revision: int
    wish_bytes: int
    pools: tuple[PoolView, ...]
    backed_min_bytes: int = 0
    deadline_ns: int = 0
    reserved_bytes: int = 0
    loaded_bytes: int = 0
    non_kv_bytes: int = 0
    non_kv_source: str = ""
    silent: bool = False
    headroom_taken_bytes: int = 0

    @property
    def limit_bytes(self) -> int | None:
        """The ceiling over all its pools on the device."""
        return self.terms.limit_bytes

    @property
    def limit_revision(self) -> int:
        """How often its terms were set."""
        return self.revision

    @property
    def loading_bytes(self) -> int:
        """Reserved, and not loaded yet."""
        return max(0, self.reserved_bytes - self.loaded_bytes)

    @property
    def charged_bytes(self) -> int:
        """What all its pools answer for."""
        return sum(pool.charge_bytes for pool in self.pools)

    @property
    def mapped_bytes(self) -> int:
        """What all its pools hold."""
        return sum(pool.mapped_bytes for pool in self.pools)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger at one moment. `sampled_ns` is monotonic time; 0 before the first sample."""

    spec: DeviceSpec
    sequence: int
    budget_bytes: int
    sampled_ns: int
    free_sampled_bytes: int
    withheld_bytes: int
    instances: tuple[InstanceView, ...]

    @property
    def charged_bytes(self) -> int:
        """What all pools answer for."""
        return sum(instance.charged_bytes for instance in self.instances)

    @property
    def free_bytes(self) -> int:
        """What could be granted now, if nobody waited."""
        return max(0, self.budget_bytes - self.charged_bytes - self.withheld_bytes)

    @property
    def headroom_bytes(self) -> int:
        """What all instances want left unclaimed."""
        return sum(instance.terms.headroom_bytes for instance in self.instances)
