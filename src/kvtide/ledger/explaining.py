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
    waits = _who_waits(others, me, asked_bytes)
    if commands:
        return "; ".join([f"This would free it: {'; '.join(commands)}", *waits])
    return f"It is free, and {'; '.join(waits)}" if waits else "It is free now"


def _who_waits(others: list[InstanceView], me: InstanceView | None, asked_bytes: int) -> list[str]:
    """Who a grant has to leave memory to, and how much of it, as `policy.set_aside` has it.

    Since when they wait is not in a snapshot: equals may come before or after.
    """
    priority = 0 if me is None else me.terms.priority
    within_min = me is not None and asked_bytes <= me.terms.min_bytes - me.charged_bytes
    before: list[str] = []
    equal: list[str] = []
    for i in sorted(others, key=lambda i: -i.terms.priority):
        wanted_bytes = i.wish_bytes
        if i.terms.limit_bytes is not None:
            wanted_bytes = min(wanted_bytes, max(0, i.terms.limit_bytes - i.charged_bytes))
        entitled_bytes = min(wanted_bytes, max(0, i.terms.min_bytes - i.charged_bytes))
        higher, lower = i.terms.priority > priority, i.terms.priority < priority
        if within_min or lower:
            wanted_bytes = entitled_bytes
        if i.state is State.DEAD or not wanted_bytes or (within_min and lower):
            continue
        notes = []
        if higher:
            notes.append(f"priority {i.terms.priority}")
        if wanted_bytes == entitled_bytes:
            notes.append(f"within its min of {format_size(i.terms.min_bytes)}")
        text = f"{i.name} for {format_size(wanted_bytes)}" + f" ({', '.join(notes)})" * bool(notes)
        certain = higher or (not within_min and wanted_bytes == entitled_bytes)
        (before if certain else equal).append(text)
    found = []
    if before:
        found.append(f"others wait before it: {', '.join(before)}")
    if equal:
        found.append(
            "others wait too, of whom the one that has waited longest comes first: "
            f"{', '.join(equal)}"
        )
    return found


def _pids(i: InstanceView) -> str:
    return " ".join(str(pid) for pid in sorted({i.pid, *(p.pid for p in i.pools)}))


def _exact(size_bytes: int) -> str:
    """As a command takes it back: nothing is rounded."""
    text = format_size(size_bytes)
    return text if "." not in text else str(size_bytes)
