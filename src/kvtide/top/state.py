"""What the user of `kvtide top` chose, and what a key makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvtide.observe.snapshot import InstanceStatus, Status

__all__ = ["SORTS", "Action", "Chosen", "Term", "ordered", "press", "settled"]

Term = Literal["limit", "min", "priority", "headroom"]

SORTS: Final = ("mapped", "in use", "cached", "name")
_ORDERS: Final[tuple[Callable[[InstanceStatus], object], ...]] = (
    lambda i: (-i.mapped_bytes, i.name),
    lambda i: (-i.used_bytes, i.name),
    lambda i: (-i.cached_bytes, i.name),
    lambda i: i.name,
)
_MAX_TYPED = 20
# What a key asks for, and what may be answered.
_TERMS: Final[dict[str, tuple[Term, str]]] = {
    "l": ("limit", "12GiB, none"),
    "m": ("min", "4GiB, 0"),
    "p": ("priority", "-1000 to 1000"),
    "h": ("headroom", "1GiB, 0"),
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the next frame shows.

    Attributes
    ----------
    key
        Device and key of the instance that is chosen.
    sort
        Which of `SORTS`.
    asking
        What is asked for now, or None; `term` is what it sets, `typed` is the answer so far.
    said
        What became of the last change.
    """

    key: tuple[str, str] | None = None
    sort: int = 0
    asking: str | None = None
    term: Term = "limit"
    typed: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """What a key asks to be done, to the instance of this name on this device."""

    what: Literal["quit", "trim"] | Term
    device: str = ""
    name: str = ""
    value: str = ""
    revision: int = 0


def ordered(instances: Sequence[InstanceStatus], sort: int) -> list[InstanceStatus]:
    """Instances in the order that was chosen."""
    return sorted(instances, key=_ORDERS[sort])  # type: ignore[arg-type]


def _keys(status: Status, sort: int) -> list[tuple[str, str]]:
    return [(d.device, i.key) for d in status.devices for i in ordered(d.instances, sort)]


def settled(chosen: Chosen, status: Status) -> Chosen:
    """The same, on an instance that is still there."""
    keys = _keys(status, chosen.sort)
    if chosen.key in keys:
        return chosen
    first = keys[0] if keys else None
    return replace(chosen, key=first, asking=None, typed="")


def _of(status: Status, key: tuple[str, str] | None) -> tuple[str, InstanceStatus] | None:
    for device in status.devices:
        for instance in device.instances:
            if (device.device, instance.key) == key:
                return device.device, instance
    return None


def press(chosen: Chosen, key: str, status: Status) -> tuple[Chosen, Action | None]:
    """What a key makes of it. Keys are characters, or up, down, enter, escape, backspace."""
    there = _of(status, chosen.key)
    if chosen.asking is not None:
        return _answer(chosen, key, there)
    chosen = replace(chosen, said="")
    if key in ("q", "escape", "\x03"):
        return chosen, Action("quit")
    if key == "s":
        return replace(chosen, sort=(chosen.sort + 1) % len(SORTS)), None
    if key in ("up", "down", "k", "j"):
        keys = _keys(status, chosen.sort)
        if chosen.key in keys:
            step = -1 if key in ("up", "k") else 1
            at = max(0, min(len(keys) - 1, keys.index(chosen.key) + step))
            chosen = replace(chosen, key=keys[at])
        return chosen, None
    if there is None:
        return chosen, None
    device, instance = there
    if key in _TERMS:
        term, answers = _TERMS[key]
        return replace(chosen, term=term, asking=f"{term} of {instance.name} ({answers})"), None
    if key == "t":
        return chosen, Action("trim", device, instance.name)
    return chosen, None


def _answer(
    chosen: Chosen, key: str, there: tuple[str, InstanceStatus] | None
) -> tuple[Chosen, Action | None]:
    done = replace(chosen, asking=None, typed="")
    if key in ("escape", "\x03") or there is None:
        return done, None
    if key == "backspace":
        return replace(chosen, typed=chosen.typed[:-1]), None
    if key == "enter":
        device, instance = there
        if not chosen.typed:
            return done, None
        revision = instance.limit_revision
        return done, Action(chosen.term, device, instance.name, chosen.typed, revision)
    if len(key) == 1 and key.isprintable() and len(chosen.typed) < _MAX_TYPED:
        return replace(chosen, typed=chosen.typed + key), None
    return chosen, None
