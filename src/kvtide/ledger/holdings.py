"""What policy and wake-ups need, read out of the words; no lock needed."""

from __future__ import annotations

from kvtide.ledger import layout as w
from kvtide.ledger.policy import Holding, demands
from kvtide.ledger.retirement import live_instances, live_pools

__all__ = ["anybody_wishes", "demands_now", "waiting"]


def _wishes(words: memoryview) -> list[int]:
    end = w.instance_at(words[w.H_INSTANCES_HIGH])
    return words[w.INSTANCES_AT + w.I_WISH : end : w.RECORD_WORDS].tolist()


def anybody_wishes(words: memoryview) -> bool:
    """Whether any instance has an unmet need registered."""
    return any(_wishes(words))


def waiting(words: memoryview, but: int | None) -> list[tuple[int, int]]:
    """Instances that wish, but one, the oldest wish first: slot and generation."""
    wishes = _wishes(words)
    if not any(wishes):
        return []
    slots = [slot for slot, wish in enumerate(wishes) if wish and slot != but]
    slots.sort(key=lambda slot: words[w.instance_at(slot) + w.I_WISH_SINCE_NS])
    return [(slot, words[w.instance_at(slot)]) for slot in slots]


def demands_now(words: memoryview) -> dict[int, int]:
    """What each instance should begin to give back, by slot, as `policy.demands` has it."""
    pools: dict[int, list[int]] = {}
    for slot in live_pools(words):
        pools.setdefault(words[w.pool_at(slot) + w.P_INSTANCE], []).append(w.pool_at(slot))
    holdings = []
    for slot in live_instances(words):
        at, own = w.instance_at(slot), pools.get(slot, [])
        limit_bytes = words[at + w.I_LIMIT]
        holdings.append(
            Holding(
                slot=slot,
                charged_bytes=sum(words[p + w.P_CHARGE] for p in own),
                limit_bytes=None if limit_bytes == w.NONE else limit_bytes,
                idle_bytes=sum(words[p + w.P_IDLE] for p in own),
                releasing_bytes=sum(words[p + w.P_RELEASING] for p in own),
                wish_bytes=words[at + w.I_WISH],
                wish_since_ns=words[at + w.I_WISH_SINCE_NS],
            )
        )
    return demands(
        holdings, budget_bytes=words[w.H_BUDGET], granularity_bytes=words[w.H_GRANULARITY]
    )
