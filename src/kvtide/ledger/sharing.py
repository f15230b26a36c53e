"""Who gives memory, and how much: pure functions of what the records say.

A *need* is headroom, memory that an engine is about to load, or an unmet wish. Headroom and loading
come first, then of the wishes what lies within an instance's min, then the rest; among equals
higher priority before lower, then the older need. For a need idle memory goes first, lowest
priority first and in proportion among equals; for a min or a higher priority then that of running
requests, never below the giver's own min.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from kvtide.ledger.policy import Holding

__all__ = ["Demand", "Reason", "demands", "reasons"]

Reason = Literal["trim", "limit", "headroom", "reservation", "min", "priority", "others"]


class Demand(NamedTuple):
    """What an instance should begin to give back now.

    Attributes
    ----------
    idle_bytes
        Of what it holds idle.
    running_bytes
        On top, of what running requests hold, by preempting them.
    """

    idle_bytes: int = 0
    running_bytes: int = 0


class _Need(NamedTuple):
    """Somebody's, in the order of being served: class, priority, age, slot."""

    order: tuple[int, int, int, int]
    holder: Holding
    size_bytes: int
    preempts: Literal["nobody", "lower", "all"]
    reason: Reason
    own_too: bool = False

    def reason_for(self, giver: Holding) -> Reason:
        """Why somebody gives for it: who comes before others anyway, or by priority alone."""
        higher = self.reason == "others" and self.holder.priority > giver.priority
        return "priority" if higher else self.reason


def _needs(holdings: Sequence[Holding]) -> list[_Need]:
    needs = []
    for h in holdings:
        wanted_bytes = h.wanted_bytes()
        within_bytes = min(wanted_bytes, h.below_min_bytes)
        beyond_bytes = wanted_bytes - within_bytes
        age, stale = (-h.priority, h.wish_since_ns, h.slot), h.wish_is_stale
        loading = (0, -h.priority, h.loading_since_ns, h.slot)
        needs += [
            # No grant gets these two, so what comes later must be collected on top of them.
            _Need((0, -h.priority, 0, h.slot), h, h.headroom_bytes, "nobody", "headroom", True),
            _Need(loading, h, h.loading_bytes, "lower", "reservation", True),
            _Need((1, *age), h, within_bytes, "nobody" if stale else "all", "min"),
            _Need((2, *age), h, beyond_bytes, "nobody" if stale else "lower", "others"),
        ]
    return sorted((n for n in needs if n.size_bytes > 0), key=lambda n: n.order)


class _Gifts:
    """What each gives in the end, counted up; what it has begun to release comes first."""

    def __init__(self, holdings: Sequence[Holding], granularity_bytes: int) -> None:
        self._holdings = holdings
        self._granularity_bytes = granularity_bytes
        self.idle = {h.slot: 0 for h in holdings}
        self.running = dict(self.idle)
        # Why, in the order in which it was counted.
        self.why: dict[int, list[tuple[Reason, int]]] = {h.slot: [] for h in holdings}
        self._can_idle = {
            h.slot: h.releasing_bytes + (0 if h.silent else h.idle_bytes) for h in holdings
        }
        self._can_run = {h.slot: 0 if h.silent else h.running_bytes for h in holdings}

    def lower(self, h: Holding, ceiling_bytes: int, reason: Reason, *, running: bool) -> int:
        """Have one give down to a ceiling of its own; the bytes on top of what it gives."""
        over_bytes = max(0, h.charged_bytes - ceiling_bytes)
        before = self.idle[h.slot] + self.running[h.slot]
        self.idle[h.slot] = max(self.idle[h.slot], min(self._can_idle[h.slot], over_bytes))
        if running:
            rest_bytes = over_bytes - self.idle[h.slot]
            self.running[h.slot] = max(0, min(self._can_run[h.slot], rest_bytes))
        more_bytes = self.idle[h.slot] + self.running[h.slot] - before
        self.why[h.slot].append((reason, more_bytes))
        return more_bytes

    def collect(self, need: _Need, missing_bytes: int, first: Mapping[int, _Need]) -> int:
        """Have others give for a need; what comes."""
        left = {}
        for h in self._holdings:
            if h.slot == need.holder.slot and not need.own_too:
                continue
            can_bytes = self._can_idle[h.slot] - self.idle[h.slot]
            if h.slot in first:
                # It waits itself: nothing for what comes after it, and its min stays its own.
                if first[h.slot].order < need.order:
                    can_bytes = 0
                can_bytes = min(can_bytes, self._above_min(h))
            left[h.slot] = can_bytes
        came_bytes = self._take(self.idle, left, missing_bytes, need)
        if need.preempts != "nobody" and came_bytes < missing_bytes:
            left = {
                h.slot: min(self._can_run[h.slot] - self.running[h.slot], self._above_min(h))
                for h in self._holdings
                if h.slot != need.holder.slot
                and (need.preempts == "all" or h.priority < need.holder.priority)
                and not (h.slot in first and first[h.slot].order < need.order)
            }
            came_bytes += self._take(self.running, left, missing_bytes - came_bytes, need)
        return came_bytes

    def _above_min(self, h: Holding) -> int:
        given_bytes = self.idle[h.slot] + self.running[h.slot]
        return max(0, h.charged_bytes - given_bytes - h.min_bytes)

    def _take(
        self, gives: dict[int, int], left: Mapping[int, int], wanted_bytes: int, need: _Need
    ) -> int:
        came_bytes = 0
        for priority in sorted({h.priority for h in self._holdings}):
            givers = {
                h.slot: h
                for h in self._holdings
                if h.priority == priority and left.get(h.slot, 0) > 0
            }
            tier = {slot: left[slot] for slot in givers}
            shares = _shares(wanted_bytes - came_bytes, tier, self._granularity_bytes)
            for slot, share_bytes in shares.items():
                gives[slot] += share_bytes
                self.why[slot].append((need.reason_for(givers[slot]), share_bytes))
                came_bytes += share_bytes
        return came_bytes


def demands(
    holdings: Sequence[Holding],
    *,
    budget_bytes: int,
    granularity_bytes: int,
    beyond_bytes: int,
) -> dict[int, Demand]:
    """What each instance should begin to give back now, by slot; nobody else appears.

    An instance gives what it holds idle above its limit, or above what it was asked to trim to.
    Needs are then served in their order, from free room first. Who waits itself gives only to those
    who come before it, so two who wish do not trade their caches. What a holder has begun to give
    back counts as given, so that asking again asks for no more. `budget_bytes`, which is less what
    is being loaded already, may be negative. What is there `beyond` it, where a cap leaves memory
    to nobody, serves for headroom first, as it does where a grant is judged.
    """
    gifts = _gifts(holdings, budget_bytes, granularity_bytes, beyond_bytes)
    result = {}
    for h in holdings:
        idle_bytes = max(0, gifts.idle[h.slot] - h.releasing_bytes)
        if idle_bytes or gifts.running[h.slot]:
            result[h.slot] = Demand(idle_bytes, gifts.running[h.slot])
    return result


def reasons(
    holdings: Sequence[Holding],
    *,
    budget_bytes: int,
    granularity_bytes: int,
    beyond_bytes: int,
) -> dict[int, Reason]:
    """For what most of each demand is, by slot, as `demands` shares them; for observers alone.

    A limit and a trim are the giver's own. Of what others need, `reservation` and `headroom` come
    before any wish; a wish is `min` within its holder's min, and `priority` where its holder's is
    higher than the giver's.
    """
    gifts = _gifts(holdings, budget_bytes, granularity_bytes, beyond_bytes)
    found: dict[int, Reason] = {}
    for h in holdings:
        given_bytes = h.releasing_bytes  # accounts for what was counted first
        sums: dict[Reason, int] = {}
        for reason, size_bytes in gifts.why[h.slot]:
            before_bytes = min(size_bytes, given_bytes)
            given_bytes -= before_bytes
            sums[reason] = sums.get(reason, 0) + size_bytes - before_bytes
        if any(sums.values()):
            found[h.slot] = max(sums, key=lambda reason: sums[reason])
    return found


def _gifts(
    holdings: Sequence[Holding], budget_bytes: int, granularity_bytes: int, beyond_bytes: int
) -> _Gifts:
    gifts = _Gifts(holdings, granularity_bytes)
    room_bytes = budget_bytes + sum(h.loading_bytes - h.charged_bytes for h in holdings)
    for h in holdings:
        if h.limit_bytes is not None:
            room_bytes += gifts.lower(h, h.limit_bytes, "limit", running=False)
        if h.trim_to_bytes is not None:
            room_bytes += gifts.lower(h, h.trim_to_bytes, "trim", running=h.trims_running)
    needs = _needs(holdings)
    first: dict[int, _Need] = {}
    for need in needs:
        if need.holder.wish_bytes and not need.own_too:
            first.setdefault(need.holder.slot, need)
    for need in needs:
        size_bytes = need.size_bytes
        if need.reason == "headroom":
            there_bytes = min(size_bytes, beyond_bytes)
            size_bytes, beyond_bytes = size_bytes - there_bytes, beyond_bytes - there_bytes
        missing_bytes = size_bytes - room_bytes
        room_bytes -= size_bytes
        if missing_bytes > 0:
            room_bytes += gifts.collect(need, missing_bytes, first)
    return gifts


def _shares(wanted_bytes: int, left: Mapping[int, int], granularity_bytes: int) -> dict[int, int]:
    """Cut what is wanted in proportion to what each has left, in granules, none above its own."""
    shares = {}
    all_left_bytes = sum(left.values())
    for slot, left_bytes in left.items():
        if wanted_bytes <= 0 or all_left_bytes <= 0:
            break
        share_bytes = -(-min(wanted_bytes, all_left_bytes) * left_bytes // all_left_bytes)
        granules = -(-share_bytes // granularity_bytes)
        shares[slot] = min(left_bytes, granules * granularity_bytes)
        wanted_bytes -= shares[slot]
        all_left_bytes -= left_bytes
    return shares
