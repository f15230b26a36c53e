"""What one instance owes now, read without the lock; asking is how it answers those who call."""

from __future__ import annotations

import time

from kvtide.ledger import layout as w
from kvtide.ledger.holdings import anybody_needs, charge_of, demands_now
from kvtide.ledger.sharing import Demand

__all__ = ["ask_demands", "end_trim", "may_owe", "trims"]


def trims(words: memoryview, at: int) -> bool:
    """Whether an instance, by its record, has not done yet what it was asked to trim."""
    asked: int = words[at + w.I_TRIM_ASKED]
    return asked != words[at + w.I_TRIM_DONE]


def end_trim(words: memoryview, at: int, asked: int | None = None) -> None:
    """It can give no more of what it was asked to: the last time, or the time of that number."""
    words[at + w.I_TRIM_DONE] = words[at + w.I_TRIM_ASKED] if asked is None else asked


def may_owe(words: memoryview, slot: int) -> bool:
    """Whether something may be demanded of an instance; cheap enough for every step."""
    at = w.instance_at(slot)
    limit_bytes = words[at + w.I_LIMIT]
    if trims(words, at) or anybody_needs(words):
        return True
    return limit_bytes != w.NONE and limit_bytes < charge_of(words, slot)


def ask_demands(words: memoryview, slot: int) -> Demand:
    """What an instance should begin to give, asked by itself; cheap when nobody needs anything."""
    at = w.instance_at(slot)
    words[at + w.I_ANSWERED_NS] = time.monotonic_ns()
    asked, limited = words[at + w.I_TRIM_ASKED], words[at + w.I_LIMIT] != w.NONE
    if not limited and not trims(words, at) and not anybody_needs(words):
        return Demand()
    found = demands_now(words)
    if slot not in found:
        # Down to what it was asked for, or to what it can.
        words[at + w.I_TRIM_DONE] = asked
    return found.get(slot, Demand())
