"""Whether what a ledger's words say can be: a flipped bit must end in words, not in a crash."""

from __future__ import annotations

from typing import Final

from kvtide.ledger import layout as w
from kvtide.ledger.records import NON_KV_SOURCES, State

__all__ = ["damage", "is_out_of_bounds"]

_MAX: Final = 1 << 62
_STATES: Final = len(State)
# Words that are sizes, counts or times in every live record, by its first and last.
_INSTANCE_WORDS: Final = slice(w.I_REVISION, w.I_TAKEN + 1)
_POOL_WORDS: Final = slice(w.P_PID, w.P_QUARANTINED + 1)
_HEADER_WORDS: Final = slice(w.H_SAMPLED_NS, w.H_FREE_SAMPLED + 1)
_PRIORITY: Final = w.I_PRIORITY - w.I_REVISION


def is_out_of_bounds(words: memoryview) -> bool:
    """Whether the tables would end beyond the file; cheap enough for every change."""
    return not (
        0 <= words[w.H_INSTANCES_HIGH] <= w.MAX_INSTANCES
        and 0 <= words[w.H_POOLS_HIGH] <= w.MAX_POOLS
    )


def damage(words: memoryview, *, tables: bool = True) -> str | None:
    """What no process of kvtide can have written, or None.

    Without `tables` only records below the tables' ends are looked at, which is several times
    faster.

    A bit that turns one possible figure into another is not seen here: it is an account that is
    wrong, within the bounds that every grant and sample holds to.
    """
    if words[w.H_MAGIC] != w.MAGIC or words[w.H_LAYOUT] != w.LAYOUT:
        return "its first words are no ledger's any more"
    published_later = words[w.H_TICKET_PUBLISHED] > words[w.H_TICKET_DRAWN]
    below_nothing = min(words[_HEADER_WORDS].tolist()) < 0
    if is_out_of_bounds(words) or published_later or below_nothing:
        return "its header holds figures that cannot be"
    if not -_MAX < words[w.H_BUDGET] < _MAX or words[w.H_GRANULARITY] < 1:
        return "its header holds a budget that cannot be"
    if _impossible([words[w.H_TOTAL], words[w.H_MARGIN], words[w.H_CAP] + 1]):
        return "its header describes a device that cannot be"
    if tables and (
        _any_live(words, words[w.H_INSTANCES_HIGH], w.MAX_INSTANCES, w.INSTANCES_AT)
        or _any_live(words, words[w.H_POOLS_HIGH], w.MAX_POOLS, w.POOLS_AT)
    ):
        return "its header leaves out records that are live"
    for slot in range(words[w.H_INSTANCES_HIGH]):
        at = w.instance_at(slot)
        if words[at] & 1 and _is_damaged_instance(words, at):
            return f"the record of instance {slot} holds figures that cannot be"
    for slot in range(words[w.H_POOLS_HIGH]):
        at = w.pool_at(slot)
        if words[at] & 1 and _is_damaged_pool(words, at):
            return f"the record of pool {slot} holds figures that cannot be"
    return None


def _any_live(words: memoryview, first: int, end: int, table_at: int) -> bool:
    step = w.RECORD_WORDS
    generations = words[table_at + first * step : table_at + end * step : step].tolist()
    return any(map((1).__and__, generations))


def _impossible(figures: list[int]) -> bool:
    return min(figures) < 0 or max(figures) >= _MAX


def _is_damaged_instance(words: memoryview, at: int) -> bool:
    record = words[at : at + w.I_TAKEN + 1]
    figures = record[_INSTANCE_WORDS].tolist()
    figures[_PRIORITY] = abs(figures[_PRIORITY])
    return (
        _impossible(figures)
        or not w.NONE <= record[w.I_LIMIT] < _MAX
        or not 0 <= record[w.I_STATE] < _STATES
        or record[w.I_NON_KV_SOURCE] >= len(NON_KV_SOURCES)
    )


def _is_damaged_pool(words: memoryview, at: int) -> bool:
    record = words[at : at + w.P_QUARANTINED + 1]
    return _impossible(record[_POOL_WORDS].tolist()) or record[w.P_INSTANCE] >= w.MAX_INSTANCES
