"""Why an instance does not get memory: who holds what, and which command would free it."""

from __future__ import annotations

from kvtide.ledger.records import InstanceView, Snapshot, State
from kvtide.units import format_size

__all__ = ["explain", "holders"]


def holders(snapshot: Snapshot) -> str:
    """Who holds what of a device, in words."""
    return ", ".join(map(_holder, snapshot.instances)) or "nothing by any instance"


def explain(snapshot: Snapshot, name: str, asked_bytes: int) -> str:
    """What was asked for, who holds what, and the commands that would free enough of it."""
    return (
        f"{name} asks for {format_size(asked_bytes)} of {snapshot.spec.uuid}, and "
        f"{format_size(snapshot.free_bytes)} of its budget of {format_size(snapshot.budget_bytes)} "
        f"are free: held are {holders(snapshot)}. {_advice(snapshot, name, asked_bytes)}"
    )


def _holder(i: InstanceView) -> str:
    notes = [i.state.value]
    idle_bytes = sum(p.figures.idle_bytes for p in i.pools)
    if idle_bytes:
        notes.append(f"{format_size(idle_bytes)} idle")
    if i.terms.priority:
        notes.append(f"priority {i.terms.priority}")
    if i.terms.min_bytes:
        notes.append(f"min {format_size(i.terms.min_bytes)}")
    if i.terms.headroom_bytes:
        notes.append(f"headroom {format_size(i.terms.headroom_bytes)}")
    if i.loading_bytes:
        notes.append(f"{format_size(i.loading_bytes)} still to load")
    if i.silent:
        notes.append(f"does not answer, process {_pids(i)}")
    return f"{i.name} {format_size(i.charged_bytes)} ({', '.join(notes)})"


def _advice(snapshot: Snapshot, name: str, asked_bytes: int) -> str:
    me = next((i for i in snapshot.instances if i.name == name), None)
    if me is not None and me.terms.limit_bytes is not None:
        needed_bytes = me.charged_bytes + asked_bytes
        if needed_bytes > me.terms.limit_bytes:
            return f"Its own limit is in the way: kvtide limit {name} {format_size(needed_bytes)}"
    missing_bytes = asked_bytes - snapshot.free_bytes
    commands = []
    others = [i for i in snapshot.instances if i.name != name]
    for i in others:
        if missing_bytes > 0 and i.state is State.DEAD:
            commands.append(f"kvtide evict {i.name}")
            missing_bytes -= i.charged_bytes
    by_size = sorted(others, key=lambda i: (i.silent, i.terms.priority, -i.charged_bytes))
    for running in (False, True):
        for i in by_size:
            idle_bytes = sum(p.figures.idle_bytes for p in i.pools)
            pinned_bytes = sum(p.figures.pinned_bytes for p in i.pools)
            can_bytes = i.charged_bytes - idle_bytes - pinned_bytes if running else idle_bytes
            if missing_bytes <= 0 or can_bytes <= 0 or i.state is State.DEAD or i.silent:
                continue
            gives_bytes = min(can_bytes, missing_bytes)
            if running:
                to_bytes = max(pinned_bytes, i.charged_bytes - idle_bytes - gives_bytes)
                commands.append(f"kvtide limit {i.name} {_exact(to_bytes)} --now")
            else:
                commands.append(f"kvtide trim {i.name}")
            missing_bytes -= gives_bytes
    for i in others:
        if missing_bytes > 0 and i.silent:
            commands.append(f"continue or end {i.name}, which does not answer: process {_pids(i)}")
            missing_bytes -= i.charged_bytes
    if missing_bytes > 0:
        commands.append(
            f"end what holds {format_size(missing_bytes)} outside of kvtide (kvtide doctor names "
            "processes), or ask for less"
        )
    return f"This would free it: {'; '.join(commands)}" if commands else "It is free now"


def _pids(i: InstanceView) -> str:
    return " ".join(str(pid) for pid in sorted({i.pid, *(p.pid for p in i.pools)}))


def _exact(size_bytes: int) -> str:
    """As a command takes it back: nothing is rounded."""
    text = format_size(size_bytes)
    return text if "." not in text else str(size_bytes)
