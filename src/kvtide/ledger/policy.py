"""Who gets memory: pure functions of what the records say. Who gives it: `sharing`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

__all__ = ["Holding", "Verdict", "backed_mins", "judge", "set_aside"]


class Verdict(NamedTuple):
    """Whether a grant may be made, and the most that could be. `reason` is None when it may."""

    reason: Literal["budget", "limit"] | None
    available_bytes: int


class Holding(NamedTuple):
    """What policy sees of an instance.

    Attributes
    ----------
    limit_bytes
        None without a limit.
    idle_bytes, releasing_bytes, pinned_bytes
        As its pools publish them.
    wish_bytes, least_bytes, wish_since_ns
        The unmet need, the part of it without which nothing goes on, and since when.
    wish_is_ripe
        It has waited so long that those of equal priority may not overtake it any more.
    wish_is_stale
        Whoever made it has not repeated it for long: it is served, but holds nobody up.
    loading_bytes, loading_since_ns
        Reserved and not loaded yet, and since when.
    trim_to_bytes, trims_running
        Somebody asked it to give back down to this (None: nobody), with running requests or not.
    silent
        It was called and has not answered: it is passed over.
    """

    slot: int
    charged_bytes: int = 0
    limit_bytes: int | None = None
    idle_bytes: int = 0
    releasing_bytes: int = 0
    wish_bytes: int = 0
    wish_since_ns: int = 0
    least_bytes: int = 0
    wish_is_ripe: bool = False
    wish_is_stale: bool = False
    pinned_bytes: int = 0
    min_bytes: int = 0
    priority: int = 0
    headroom_bytes: int = 0
    loading_bytes: int = 0
    loading_since_ns: int = 0
    trim_to_bytes: int | None = None
    trims_running: bool = False
    silent: bool = False

    @property
    def running_bytes(self) -> int:
        """What running requests hold."""
        still = self.idle_bytes + self.releasing_bytes + self.pinned_bytes
        return max(0, self.charged_bytes - still)

    @property
    def below_min_bytes(self) -> int:
        """What it lacks to its min."""
        return max(0, self.min_bytes - self.charged_bytes)

    def wanted_bytes(self) -> int:
        """Its wish as far as its limit allows it."""
        if self.limit_bytes is None:
            return self.wish_bytes
        return min(self.wish_bytes, max(0, self.limit_bytes - self.charged_bytes))


def judge(
    asked_bytes: int,
    *,
    budget_bytes: int,
    charged_bytes: int,
    limit_bytes: int | None,
    instance_charged_bytes: int,
    withheld_bytes: int = 0,
) -> Verdict:
    """Decide one grant: within the device's budget, and within the instance's limit.

    `withheld_bytes` of the budget are not to be had: headroom, and what is set aside for others.
    """
    room_bytes = budget_bytes - charged_bytes - withheld_bytes
    reason: Literal["budget", "limit"] | None = None if asked_bytes <= room_bytes else "budget"
    if limit_bytes is not None:
        below_limit_bytes = limit_bytes - instance_charged_bytes
        if asked_bytes > below_limit_bytes:
            reason = "limit"
        room_bytes = min(room_bytes, below_limit_bytes)
    return Verdict(reason, max(0, room_bytes))


def set_aside(
    asked_bytes: int, asker: Holding, wishers: Iterable[Holding], *, lendable_bytes: int
) -> int:
    """What a grant to the asker must leave to others who wait and come before it.

    Who waits at equal priority holds the asker up only once its wish is ripe, and only for the part
    without which it cannot go on: engines that both want all take turns then, instead of preempting
    themselves for each other at every step. A wish that not even all that others could give would
    meet holds nobody up.

    `lendable_bytes` is the budget less headroom and less what pools can never give back.
    """
    within_bytes = min(asked_bytes, asker.below_min_bytes)
    beyond = asked_bytes > within_bytes
    now_or_never = 1 << 63
    # Who can go on without what it wishes for has no place among those who cannot.
    waits = asker.wish_bytes and asker.least_bytes
    since_ns = asker.wish_since_ns if waits else now_or_never
    aside_bytes = 0
    for w in wishers:
        if w.slot == asker.slot or w.wish_is_stale:
            continue
        need_bytes = w.wanted_bytes()
        obtainable_bytes = lendable_bytes + w.pinned_bytes - w.charged_bytes
        if need_bytes > obtainable_bytes:
            need_bytes = w.least_bytes if 0 < w.least_bytes <= obtainable_bytes else 0
        older = w.wish_since_ns < since_ns
        first_bytes = min(need_bytes, w.below_min_bytes)
        if beyond or w.priority > asker.priority or (w.priority == asker.priority and older):
            aside_bytes += first_bytes
        if not beyond:
            continue
        if w.priority > asker.priority:
            aside_bytes += need_bytes - first_bytes
        elif w.priority == asker.priority and older and w.wish_is_ripe:
            aside_bytes += max(0, min(need_bytes, w.least_bytes) - first_bytes)
    return aside_bytes


def backed_mins(mins: Sequence[tuple[int, int, int]], *, budget_bytes: int) -> dict[int, int]:
    """How much of each min the budget backs, by slot; the mins as (slot, priority, bytes).

    Where it does not suffice for all, higher priority comes first, then the lower slot.
    """
    left_bytes = max(0, budget_bytes)
    backed = {}
    for slot, _, min_bytes in sorted(mins, key=lambda m: (-m[1], m[0])):
        backed[slot] = min(min_bytes, left_bytes)
        left_bytes -= backed[slot]
    return backed
