"""Calibration: what a device's budget is, from a sample of its free memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtide.ledger import layout as w
from kvtide.ledger.holdings import waiting
from kvtide.ledger.retirement import live_instances, live_pools

if TYPE_CHECKING:
    from kvtide.ledger.ledger import Ledger

__all__ = ["Outcome", "Taken", "Ticket", "draw_ticket", "is_stale", "publish_sample", "take_sample"]

_SAMPLE_TRIES: Final = 3
_MAX_BYTES: Final = (1 << 62) - 1

FRESH_NS: Final = 1_000_000_000
FRESH_AFTER_RETIREMENT_NS: Final = 20_000_000
RETIREMENT_MATTERS_NS: Final = 2_000_000_000


class Ticket(NamedTuple):
    """What is read under the lock before a sample is taken; its number orders samples.

    `loading` is what instances had reserved and not loaded yet, by slot and generation.
    """

    number: int
    removals: int
    begun_ns: int
    created_bytes: int
    pools: tuple[int, ...]
    loading: dict[tuple[int, int], int]


class Taken(NamedTuple):
    """Where an instance's record is, and who says what of its headroom it has taken by now."""

    at: int
    told: Callable[[], int]


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
    begun_ns = time.monotonic_ns()
    return Ticket(number, words[w.H_REMOVALS], begun_ns, created_bytes, pools, loading_now(words))


def loading_now(words: memoryview) -> dict[tuple[int, int], int]:
    """What instances have reserved and not loaded yet, by slot and generation."""
    loading = {}
    for slot in live_instances(words):
        at = w.instance_at(slot)
        left_bytes = words[at + w.I_RESERVED] - words[at + w.I_LOADED]
        if left_bytes > 0:
            loading[slot, words[at]] = left_bytes
    return loading


def publish_sample(words: memoryview, ticket: Ticket, free_bytes: int) -> Outcome:
    """Under the lock again: publish the budget that the sample found.

    It is what the pools surely held at the sample, plus what was free, less the margin: memory
    counted as created before it and not as released after it. So it is never more than was really
    there. The sample is discarded if any pool ended meanwhile: the pool's memory may be in both
    terms. It is dropped if a later one has been published.

    What is reserved and was not loaded yet comes off: as it was before the sample, so that nothing
    loaded meanwhile is in both terms, and for those who have reserved since as it is now.
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
    loading = loading_now(words)
    loading_bytes = sum(
        max(ticket.loading.get(key, 0), loading.get(key, 0))
        for key in ticket.loading.keys() | loading.keys()
    )
    there_bytes = held_bytes + free_bytes - words[w.H_MARGIN] - loading_bytes
    # Only figures that are damaged come to more than a word holds.
    there_bytes = max(-_MAX_BYTES, min(there_bytes, _MAX_BYTES))
    budget_bytes = min(there_bytes, ceiling_bytes)
    rose = budget_bytes > words[w.H_BUDGET]
    # The number first: dying after it leaves an old budget, which the next sample mends; dying
    # before it, with the budget stored, would let an older sample overwrite a newer one.
    words[w.H_TICKET_PUBLISHED] = ticket.number
    words[w.H_BEYOND] = there_bytes - budget_bytes
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


def take_sample(ledger: Ledger, sampler: Callable[[], int], taken: Taken | None = None) -> bool:
    """Measure free memory and publish the budget; whether the budget is as new as this call.

    With it goes what the sampler's own instance has `taken` of its headroom: that is missing from
    what is free, and need not be left free any more.

    Who has died is retired first: what a dead pool held may be free already and still be counted
    as held. A pool that ends or dies meanwhile makes the sample worthless; then it is taken again,
    three times at most. False too when the ledger is busy.
    """
    file, words = ledger.file, ledger.file.words
    for _ in range(_SAMPLE_TRIES):
        ledger.end_dead()
        try:
            if not file.begin():
                return False
            ticket = draw_ticket(words)
        finally:
            file.end()
        taken_bytes = 0 if taken is None else max(0, taken.told())
        free_bytes = sampler()
        waits: list[tuple[int, int]] = []
        try:
            if not file.begin():
                return False
            if not all(file.is_leased(w.pool_at(slot)) for slot in ticket.pools):
                continue
            outcome = publish_sample(words, ticket, free_bytes)
            if taken is not None and outcome.settled:
                words[taken.at + w.I_TAKEN] = taken_bytes
            if outcome.rose:
                waits = waiting(words, None)
        finally:
            file.end()
        if waits:
            ledger.bell.ring(waits)
        if outcome.settled:
            return True
    return False
