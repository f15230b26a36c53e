"""What policy and wake-ups need, read out of the words; no lock needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvtide.ledger import layout as w
from kvtide.ledger.policy import Holding, set_aside
from kvtide.ledger.retirement import live_instances, live_pools
from kvtide.ledger.sharing import Demand, Reason, demands, reasons

__all__ = [
    "anybody_needs",
    "charge_of",
    "demands_now",
    "headroom_now",
    "headroom_of",
    "holding_of",
    "is_silent",
    "reasons_now",
    "set_aside_now",
    "waiting",
]

SILENT_NS: Final = 500_000_000
RIPE_NS: Final = 2_000_000_000
# A waiter looks again every 4 s at the most, and repeats its wish then.
STALE_NS: Final = 10_000_000_000


def _column(words: memoryview, word: int) -> list[int]:
    """One word of all instance records, by slot. Ended records have zeros that matter nowhere."""
    end = w.instance_at(words[w.H_INSTANCES_HIGH])
    return words[w.INSTANCES_AT + word : end : w.RECORD_WORDS].tolist()


def anybody_needs(words: memoryview) -> bool:
    """Whether any instance has an unmet wish, is loading, or wants headroom of the budget."""
    return any(any(_column(words, word)) for word in (w.I_WISH, w.I_RESERVED)) or (
        headroom_now(words) > 0
    )


def charge_of(words: memoryview, slot: int) -> int:
    """What all pools of an instance answer for."""
    end = w.pool_at(words[w.H_POOLS_HIGH])
    charges = words[w.POOLS_AT + w.P_CHARGE : end : w.RECORD_WORDS].tolist()
    owners = words[w.POOLS_AT + w.P_INSTANCE : end : w.RECORD_WORDS].tolist()
    return sum(c for c, o in zip(charges, owners, strict=True) if o == slot)


def headroom_of(words: memoryview, at: int) -> int:
    """What the instance whose record is at a word wants left unclaimed beside what it has taken."""
    return max(0, words[at + w.I_HEADROOM] - words[at + w.I_TAKEN])


def headroom_now(words: memoryview) -> int:
    """What all instances want left unclaimed, beyond what no budget lends anyway."""
    wanted = _column(words, w.I_HEADROOM)
    if not any(wanted):
        return 0
    taken = _column(words, w.I_TAKEN)
    if any(taken):
        wanted = [max(0, h - t) for h, t in zip(wanted, taken, strict=True)]
    return max(0, sum(wanted) - words[w.H_BEYOND])


def waiting(words: memoryview, but: int | None) -> list[tuple[int, int]]:
    """Instances that wish, but one, by priority and then the oldest first: slot and generation."""
    wishes = _column(words, w.I_WISH)
    if not any(wishes):
        return []
    slots = [slot for slot, wish in enumerate(wishes) if wish and slot != but]

    def order(slot: int) -> tuple[int, int]:
        at = w.instance_at(slot)
        return -words[at + w.I_PRIORITY], words[at + w.I_WISH_SINCE_NS]

    return [(slot, words[w.instance_at(slot)]) for slot in sorted(slots, key=order)]


def is_silent(words: memoryview, at: int, now_ns: int) -> bool:
    """Whether the instance whose record is at a word was called and has not answered in time."""
    called_ns: int = words[at + w.I_CALLED_NS]
    return called_ns > words[at + w.I_ANSWERED_NS] and now_ns - called_ns > SILENT_NS


def holding_of(words: memoryview, slot: int, pools: Sequence[int], now_ns: int) -> Holding:
    """One instance, with its pools' slots."""
    at = w.instance_at(slot)
    own = [w.pool_at(p) for p in pools]
    limit_bytes, wish_bytes = words[at + w.I_LIMIT], words[at + w.I_WISH]
    trims = words[at + w.I_TRIM_ASKED] != words[at + w.I_TRIM_DONE]
    return Holding(
        slot=slot,
        charged_bytes=sum(words[p + w.P_CHARGE] for p in own),
        limit_bytes=None if limit_bytes == w.NONE else limit_bytes,
        idle_bytes=sum(words[p + w.P_IDLE] for p in own),
        releasing_bytes=sum(words[p + w.P_RELEASING] for p in own),
        wish_bytes=wish_bytes,
        wish_since_ns=words[at + w.I_WISH_SINCE_NS],
        least_bytes=words[at + w.I_WISH_LEAST],
        wish_is_ripe=now_ns - words[at + w.I_WISH_SINCE_NS] > RIPE_NS,
        wish_is_stale=now_ns - words[at + w.I_WISH_SEEN_NS] > STALE_NS,
        pinned_bytes=sum(words[p + w.P_PINNED] + words[p + w.P_QUARANTINED] for p in own),
        min_bytes=words[at + w.I_MIN],
        priority=words[at + w.I_PRIORITY],
        headroom_bytes=headroom_of(words, at),
        loading_bytes=max(0, words[at + w.I_RESERVED] - words[at + w.I_LOADED]),
        loading_since_ns=words[at + w.I_RESERVED_NS],
        trim_to_bytes=words[at + w.I_TRIM_TO] if trims else None,
        trims_running=trims and bool(words[at + w.I_TRIM_RUNNING]),
        silent=is_silent(words, at, now_ns),
    )


def demands_now(words: memoryview) -> dict[int, Demand]:
    """What each instance should begin to give back, by slot, as `sharing.demands` has it."""
    return demands(
        _holdings(words),
        budget_bytes=words[w.H_BUDGET],
        granularity_bytes=words[w.H_GRANULARITY],
        beyond_bytes=words[w.H_BEYOND],
    )


def reasons_now(words: memoryview) -> dict[int, Reason]:
    """For what these are, by slot."""
    return reasons(
        _holdings(words),
        budget_bytes=words[w.H_BUDGET],
        granularity_bytes=words[w.H_GRANULARITY],
        beyond_bytes=words[w.H_BEYOND],
    )


def _holdings(words: memoryview) -> list[Holding]:
    pools: dict[int, list[int]] = {}
    for slot in live_pools(words):
        pools.setdefault(words[w.pool_at(slot) + w.P_INSTANCE], []).append(slot)
    now_ns = time.monotonic_ns()
    return [holding_of(words, s, pools.get(s, ()), now_ns) for s in live_instances(words)]


def set_aside_now(words: memoryview, slot: int, asked_bytes: int, lendable_bytes: int) -> int:
    """What a grant to an instance must leave to those who wait and come before it.

    `lendable_bytes` is the budget less headroom. It binds under the lock alone; cheap unless others
    wish.
    """
    wishes = _column(words, w.I_WISH)
    others = [s for s, wish in enumerate(wishes) if wish and s != slot]
    if not others:
        return 0
    pools: dict[int, list[int]] = {}
    pinned_bytes = 0
    for pool in live_pools(words):
        at = w.pool_at(pool)
        pools.setdefault(words[at + w.P_INSTANCE], []).append(pool)
        pinned_bytes += words[at + w.P_PINNED] + words[at + w.P_QUARANTINED]
    now_ns = time.monotonic_ns()
    asker, *wishers = (holding_of(words, s, pools.get(s, ()), now_ns) for s in (slot, *others))
    return set_aside(asked_bytes, asker, wishers, lendable_bytes=lendable_bytes - pinned_bytes)
