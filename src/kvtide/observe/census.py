"""What a running instance really allocated, by kind, beside its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtide.device.census import holdings
from kvtide.errors import KvtideError, LedgerError
from kvtide.ledger import InstanceView, Ledger, PoolView, Snapshot
from kvtide.observe.own_figures import Allocated, OwnFigures, read_figures
from kvtide.sizing.gate import compare
from kvtide.sizing.layers import Kind
from kvtide.sizing.model import read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request

__all__ = ["Census", "CensusLine", "RankCensus", "take_census"]

_STATES = {
    kind.value
    for kind in (
        Kind.MAMBA1,
        Kind.MAMBA2,
        Kind.GATED_DELTA_NET,
        Kind.LINEAR,
        Kind.SHORT_CONV,
    )
}


class CensusLine(msgspec.Struct, frozen=True):
    """One kind or one allocation. `planned_bytes`: None where nothing planned it.

    `differs`: by more than 1% of what was planned.
    """

    name: str
    planned_bytes: int | None
    found_bytes: int
    differs: bool


class RankCensus(msgspec.Struct, frozen=True):
    """One rank. `kv` and `state` among the kinds are addresses; memory under them is below.

    Attributes
    ----------
    kinds
        Weights, kv, state, graphs, activations, context, other.
    allocations
        What KV and state consist of.
    charged_bytes, mapped_bytes
        By the ledger: what it answers for, and what is mapped now.
    kernel_bytes
        The same by the kernel, on the host device; None on a GPU.
    source
        Who said how much the kinds are; None where the worker told nothing.
    unplanned
        Why there is no plan; None where there is one.
    """

    device: str
    rank: int
    pid: int
    budget_bytes: int | None
    kinds: tuple[CensusLine, ...]
    allocations: tuple[CensusLine, ...]
    charged_bytes: int
    mapped_bytes: int
    kernel_bytes: int | None
    source: str | None
    unplanned: str | None


class Census(msgspec.Struct, frozen=True):
    """One instance on all its devices."""

    name: str
    ranks: tuple[RankCensus, ...]


def take_census(directory: Path, name: str) -> Census:
    """Look at a running instance, without a lock and without disturbing it.

    Raises
    ------
    LedgerError
        No instance of this name runs, or a ledger cannot be read.
    """
    ranks: list[RankCensus] = []
    others: set[str] = set()
    for path in Ledger.existing(directory):
        with Ledger.read(path) as observer:
            snapshot = observer.snapshot()
        others |= {instance.name for instance in snapshot.instances}
        for instance in snapshot.instances:
            if instance.name == name:
                ranks += _ranks(snapshot, instance)
    if name not in others:
        there = ", ".join(sorted(others)) or "none at all"
        raise LedgerError(f"no instance {name!r} runs; there is {there} (in {directory})")
    return Census(name, tuple(sorted(ranks, key=lambda r: (r.rank, r.device))))


def _ranks(snapshot: Snapshot, instance: InstanceView) -> Iterable[RankCensus]:
    on_host = snapshot.spec.backend == "host"
    held = holdings(snapshot.spec.uuid) if on_host else []
    for pool in instance.pools:
        figures = read_figures(pool.pid)
        kernel_bytes = sum(h.size_bytes for h in held if h.pid == pool.pid) if on_host else None
        yield rank_census(snapshot.spec.uuid, pool, figures, kernel_bytes, _anonymous(pool.pid))


def rank_census(
    device: str,
    pool: PoolView,
    figures: OwnFigures | None,
    kernel_bytes: int | None,
    anonymous_bytes: int | None,
) -> RankCensus:
    """One rank, from what the ledger, the worker and the kernel say.

    Parameters
    ----------
    kernel_bytes
        What the worker holds of a host device; None on a GPU.
    anonymous_bytes
        The process's own memory, for a host device; None where it is not known.
    """
    allocated = () if figures is None else figures.allocated
    planned, unplanned = _plan(figures)
    found = _by_kind(allocated)
    found |= {} if figures is None else figures.bytes_by_kind
    if kernel_bytes is not None and anonymous_bytes is not None:
        found["other"] = max(0, anonymous_bytes - found.get("weights", 0))
    want = {} if planned is None else _by_kind(planned)
    want |= {} if figures is None else figures.planned_bytes
    return RankCensus(
        device=device,
        rank=pool.rank,
        pid=pool.pid,
        budget_bytes=None if figures is None else figures.budget_bytes,
        kinds=_lines(want, found),
        allocations=_allocation_lines(planned, allocated),
        charged_bytes=pool.charge_bytes,
        mapped_bytes=pool.mapped_bytes,
        kernel_bytes=kernel_bytes,
        source=None if figures is None else figures.source,
        unplanned=unplanned,
    )


def _plan(figures: OwnFigures | None) -> tuple[Sequence[Allocated] | None, str | None]:
    """What the plan allocates on the rank, or why there is none."""
    if figures is None:
        return None, "its worker tells nothing of itself (it is still starting, or another user's)"
    if figures.config_file is None:
        return None, "the model's config.json is not on this machine"
    if figures.budget_bytes is None:
        return None, "a number of blocks was given, and no bytes"
    given: dict[str, Any] = dict(figures.request)
    try:
        if figures.draft_file is not None:
            given["draft"] = read_model(figures.draft_file)
        request = Request(engine=figures.engine, **given)
        model = read_model(figures.config_file, dtype=figures.dtype)
        plan = make_plan(model, request, figures.budget_bytes)
    except KvtideError as error:
        return None, str(error)
    rank = plan.ranks[figures.rank % len(plan.ranks)]
    return [Allocated(a.name, a.kind, a.layers, a.count, a.bytes) for a in rank.allocations], None


def _by_kind(allocated: Sequence[Allocated]) -> dict[str, int]:
    """KV and state bytes; what attention and states take turns on is KV, and so is padding."""
    found: dict[str, int] = {}
    for one in allocated:
        only_states = set(one.kind.removeprefix("draft ").split(" + ")) <= _STATES
        kind = "state" if only_states else "kv"
        found[kind] = found.get(kind, 0) + one.bytes
    return found


def _lines(planned: dict[str, int], found: dict[str, int]) -> tuple[CensusLine, ...]:
    order = ("weights", "kv", "state", "graphs", "activations", "context", "other")
    both = {line.kind: line for line in compare(planned, found)}
    return tuple(
        CensusLine(
            kind,
            planned.get(kind),
            both[kind].found_bytes,
            kind in planned and both[kind].differs,
        )
        for kind in order
        if kind in both
    )


def _allocation_lines(
    planned: Sequence[Allocated] | None, found: Sequence[Allocated]
) -> tuple[CensusLine, ...]:
    """By the layers that lie in an allocation, however it is called; in the plan's order."""

    def key(one: Allocated) -> str:
        return " + ".join(sorted(one.layers)) or one.name

    names = {key(one): one.name for one in (*found, *(planned or ()))}
    have = {key(one): one.bytes for one in found}
    if planned is None:
        return tuple(CensusLine(names[k], None, size, False) for k, size in have.items())
    want = {key(one): one.bytes for one in planned}
    return tuple(
        CensusLine(names[line.kind], line.planned_bytes, line.found_bytes, line.differs)
        for line in compare(want, have)
    )


def _anonymous(pid: int) -> int | None:
    """Bytes of a process that no file is behind, by the kernel; None once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
