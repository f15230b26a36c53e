"""Calibration: what a device's budget is, from a sample of its free memory."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from kvtide.ledger import layout as w
from kvtide.ledger.retirement import live_pools

__all__ = ["Outcome", "Ticket", "draw_ticket", "is_stale", "publish_sample"]

FRESH_NS: Final = 1_000_000_000
FRESH_AFTER_RETIREMENT_NS: Final = 20_000_000
RETIREMENT_MATTERS_NS: Final = 2_000_000_000


class Ticket(NamedTuple):
    """What is read under the lock before a sample is taken; its number orders samples."""

    number: int
    removals: int
    begun_ns: int
    created_bytes: int
    pools: tuple[int, ...]


class Outcome(NamedTuple):
    """Whether the sample counted, or a newer one had been published; whether the budget rose."""

    settled: bool
    rose: bool


def draw_ticket(words: memoryview) -> Ticket:
    """Under the lock: begin a sample. Everything read here is older than the sample."""
    number = words[w.H_TICKET_DRAWN] + 1
    words[w.H_TICKET_DRAWN] = number
    pools = tuple(live_pools(words))
    created_bytes = sum(words[w.pool_at(slot) + w.P_CREATED] for slot in pools)
    return Ticket(number, words[w.H_REMOVALS], time.monotonic_ns(), created_bytes, pools)


def publish_sample(words: memoryview, ticket: Ticket, free_bytes: int) -> Outcome:
    """Under the lock again: publish the budget that the sample found.

    It is what the pools surely held at the sample, plus what was free, less the margin: memory
    counted as created before it and not as released after it. So it is never more than was really
    there. The sample is discarded if any pool ended meanwhile: the pool's memory may be in both
    terms. It is dropped if a later one has been published.
    """
    if words[w.H_REMOVALS] != ticket.removals:
        return Outcome(settled=False, rose=False)
    if ticket.number <= words[w.H_TICKET_PUBLISHED]:
        return Outcome(settled=True, rose=False)
    released_bytes = sum(words[w.pool_at(slot) + w.P_RELEASED] for slot in ticket.pools)
    held_bytes = ticket.created_bytes - released_bytes
    ceiling_bytes = words[w.H_TOTAL] - words[w.H_MARGIN]
    if words[w.H_CAP] != w.NONE:
        ceiling_bytes = min(ceiling_bytes, words[w.H_CAP])
    budget_bytes = min(held_bytes + free_bytes - words[w.H_MARGIN], ceiling_bytes)
    rose = budget_bytes > words[w.H_BUDGET]
    # The number first: dying after it leaves an old budget, which the next sample mends; dying
    # before it, with the budget stored, would let an older sample overwrite a newer one.
    words[w.H_TICKET_PUBLISHED] = ticket.number
    words[w.H_BUDGET] = budget_bytes
    words[w.H_FREE_SAMPLED] = free_bytes
    words[w.H_SAMPLED_NS] = ticket.begun_ns
    return Outcome(settled=True, rose=rose)


def is_stale(words: memoryview) -> bool:
    """Whether a grant refused by the published sample deserves a new one."""
    now_ns = time.monotonic_ns()
    fresh_ns = FRESH_NS
    if 0 <= now_ns - words[w.H_RETIRED_NS] < RETIREMENT_MATTERS_NS:
        fresh_ns = FRESH_AFTER_RETIREMENT_NS
    sampled_ns: int = words[w.H_SAMPLED_NS]
    # A sample from the future is from before a reboot.
    return sampled_ns == 0 or not 0 <= now_ns - sampled_ns <= fresh_ns
