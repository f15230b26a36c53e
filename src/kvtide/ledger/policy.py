"""Who gets memory and who gives it back: pure functions of what the records say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["Holding", "Verdict", "demands", "judge"]


class Verdict(NamedTuple):
    """Whether a grant may be made, and the most that could be. `reason` is None when it may."""

    reason: Literal["budget", "limit"] | None
    available_bytes: int


class Holding(NamedTuple):
    """What policy sees of an instance. `limit_bytes` is None without a limit."""

    slot: int
    charged_bytes: int
    limit_bytes: int | None
    idle_bytes: int
    releasing_bytes: int
    wish_bytes: int
    wish_since_ns: int


def judge(
    asked_bytes: int,
    *,
    budget_bytes: int,
    charged_bytes: int,
    limit_bytes: int | None,
    instance_charged_bytes: int,
) -> Verdict:
    """Decide one grant: within the device's budget, and within the instance's limit."""
    room_bytes = budget_bytes - charged_bytes
    reason: Literal["budget", "limit"] | None = None if asked_bytes <= room_bytes else "budget"
    if limit_bytes is not None:
        below_limit_bytes = limit_bytes - instance_charged_bytes
        if asked_bytes > below_limit_bytes:
            reason = "limit"
        room_bytes = min(room_bytes, below_limit_bytes)
    return Verdict(reason, max(0, room_bytes))


def demands(
    holdings: Sequence[Holding], *, budget_bytes: int, granularity_bytes: int
) -> dict[int, int]:
    """What each instance should begin to give back now, by slot; nobody else appears.

    An instance gives what it holds idle above its limit. Wishes are then served in the order in
    which they were made: from free room first, then by all who hold idle memory and wish for
    nothing themselves, or began to wish later, in proportion to what they hold idle. So the oldest
    wish always wins, and two who wish do not trade their caches. What a holder has begun to give
    back counts as given, so that asking again asks for no more. `budget_bytes` may be negative.
    """
    can_give = {h.slot: h.idle_bytes + h.releasing_bytes for h in holdings}
    gives = dict.fromkeys(can_give, 0)
    room_bytes = budget_bytes - sum(h.charged_bytes for h in holdings)
    for h in holdings:
        if h.limit_bytes is not None:
            over_bytes = min(can_give[h.slot], max(0, h.charged_bytes - h.limit_bytes))
            gives[h.slot] = over_bytes
            room_bytes += over_bytes
    wishes = sorted((h for h in holdings if h.wish_bytes > 0), key=_age)
    for wish in wishes:
        need_bytes = wish.wish_bytes
        if wish.limit_bytes is not None:
            need_bytes = min(need_bytes, max(0, wish.limit_bytes - wish.charged_bytes))
        missing_bytes = need_bytes - room_bytes
        room_bytes -= need_bytes
        if need_bytes == 0 or missing_bytes <= 0:
            continue
        givers = [
            h for h in holdings if h is not wish and (not h.wish_bytes or _age(h) > _age(wish))
        ]
        left = {h.slot: can_give[h.slot] - gives[h.slot] for h in givers}
        for slot, share_bytes in _shares(missing_bytes, left, granularity_bytes).items():
            gives[slot] += share_bytes
            room_bytes += share_bytes
    return {
        h.slot: gives[h.slot] - h.releasing_bytes
        for h in holdings
        if gives[h.slot] > h.releasing_bytes
    }


def _age(holding: Holding) -> tuple[int, int]:
    return holding.wish_since_ns, holding.slot


def _shares(wanted_bytes: int, left: dict[int, int], granularity_bytes: int) -> dict[int, int]:
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
