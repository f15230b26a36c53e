"""Records that end: closed by their owner, or retired when the kernel dropped their lease."""

from __future__ import annotations

import time

from kvtide.ledger import layout as w
from kvtide.ledger.file import LedgerFile

__all__ = ["live_instances", "live_pools", "pools_of", "remove_pool", "retire", "suspects"]


def live_instances(words: memoryview) -> list[int]:
    """Slots of the live instance records."""
    end = w.instance_at(words[w.H_INSTANCES_HIGH])
    generations = words[w.INSTANCES_AT : end : w.RECORD_WORDS].tolist()
    return [slot for slot, generation in enumerate(generations) if generation & 1]


def live_pools(words: memoryview) -> list[int]:
    """Slots of the live pool records."""
    end = w.pool_at(words[w.H_POOLS_HIGH])
    generations = words[w.POOLS_AT : end : w.RECORD_WORDS].tolist()
    return [slot for slot, generation in enumerate(generations) if generation & 1]


def pools_of(words: memoryview, instance_slot: int) -> list[int]:
    """Slots of an instance's live pools."""
    return [s for s in live_pools(words) if words[w.pool_at(s) + w.P_INSTANCE] == instance_slot]


def suspects(file: LedgerFile) -> bool:
    """Whether some live record has no lease; to be asked without the lock."""
    words = file.words
    return any(not file.is_leased(w.pool_at(slot)) for slot in live_pools(words)) or any(
        not file.is_leased(w.instance_at(slot)) for slot in live_instances(words)
    )


def remove_pool(words: memoryview, slot: int) -> None:
    """Under the lock: end a pool's record, its charge and the budget falling together.

    The driver may not have freed the memory yet, so no credit may appear here: the next sample
    finds what there is. A sample that was begun before is discarded for the same reason, therefore
    the removal is counted first. The budget is lowered before the charge, since a death in between
    must leave too little room and never too much; and the record ends before its charge is
    dropped, since a live record without its charge could neither be refunded nor explained. A
    charge left in an ended record is what `repair` mends.
    """
    at = w.pool_at(slot)
    words[w.H_REMOVALS] += 1
    words[w.H_BUDGET] -= words[at + w.P_CHARGE]
    words[at + w.P_GENERATION] += 1
    words[at + w.P_CHARGE] = 0
    _lower_high(words, w.H_POOLS_HIGH, w.POOLS_AT)


def _remove_instance(words: memoryview, slot: int) -> None:
    at = w.instance_at(slot)
    _drop_claims(words, at)
    words[at + w.I_GENERATION] += 1
    _lower_high(words, w.H_INSTANCES_HIGH, w.INSTANCES_AT)


def _drop_claims(words: memoryview, at: int) -> None:
    """The dead want nothing. What a reservation kept comes back with the next sample alone."""
    for word in (w.I_WISH, w.I_RESERVED, w.I_LOADED, w.I_HEADROOM, w.I_TAKEN, w.I_MIN):
        words[at + word] = 0


def _lower_high(words: memoryview, high_at: int, table_at: int) -> None:
    high = words[high_at]
    while high and not words[table_at + (high - 1) * w.RECORD_WORDS] & 1:
        high -= 1
    words[high_at] = high


def retire(file: LedgerFile) -> tuple[int, list[tuple[int, int]]]:
    """Under the lock: end every record whose lease is gone.

    A pool ends at once; an instance, whose claims are dropped at once, with the last of its pools.

    Returns
    -------
    int
        Pool and instance records ended.
    list of (int, int)
        Slot and generation of the instances among them, whose sockets are leftovers now.
    """
    words = file.words
    ended = 0
    for slot in live_pools(words):
        if not file.is_leased(w.pool_at(slot)):
            # Noted first: it only makes refused grants ask for samples more often.
            words[w.H_RETIRED_NS] = time.monotonic_ns()
            remove_pool(words, slot)
            ended += 1
    gone = []
    for slot in live_instances(words):
        at = w.instance_at(slot)
        if file.is_leased(at):
            continue
        _drop_claims(words, at)
        if not pools_of(words, slot):
            gone.append((slot, words[at + w.I_GENERATION]))
            _remove_instance(words, slot)
            ended += 1
    return ended, gone
