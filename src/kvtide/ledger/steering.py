"""What steers an instance from outside: its terms under a revision, and requests to trim it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtide.errors import LedgerError, NoInstanceError, StaleRevisionError, UsageError
from kvtide.ledger import layout as w
from kvtide.ledger.holdings import demands_now, waiting
from kvtide.ledger.reading import terms_of
from kvtide.ledger.records import Terms
from kvtide.ledger.retirement import live_instances, pools_of
from kvtide.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.ledger.ledger import Ledger

__all__ = ["ask_to_trim", "change_terms", "check_mins", "check_terms", "store_terms"]

_MAX_BYTES: Final = 1 << 62
_MAX_PRIORITY: Final = 1000


def check_terms(terms: Terms) -> None:
    """Refuse terms that nobody can have.

    Raises
    ------
    UsageError
        A size or the priority is out of range, or the min is above the limit.
    """
    for what, size_bytes in (
        ("limit", terms.limit_bytes or 0),
        ("min", terms.min_bytes),
        ("headroom", terms.headroom_bytes),
    ):
        if not 0 <= size_bytes < _MAX_BYTES:
            raise UsageError(f"a {what} cannot be {size_bytes} bytes")
    if abs(terms.priority) > _MAX_PRIORITY:
        raise UsageError(
            f"a priority cannot be {terms.priority}: it is from {-_MAX_PRIORITY} to {_MAX_PRIORITY}"
        )
    if terms.limit_bytes is not None and terms.min_bytes > terms.limit_bytes:
        raise UsageError(
            f"a min of {format_size(terms.min_bytes)} is above the limit of "
            f"{format_size(terms.limit_bytes)}: lower the one or raise the other"
        )


def check_mins(ledger: Ledger, words: memoryview, name: str, slot: int | None, new: Terms) -> None:
    """Under the lock: refuse a min or a headroom that the budget cannot back beside the others'.

    Raises
    ------
    LedgerError
        With the table of who has which.
    """
    rows, taken_bytes = {}, {}
    for s in live_instances(words):
        at = w.instance_at(s)
        row = name if s == slot else w.get_text(ledger.file.raw, at + w.I_NAME, w.NAME_BYTES)
        rows[row], taken_bytes[row] = terms_of(words, s), words[at + w.I_TAKEN]
    rows[name] = new
    spec = ledger.spec
    budget_bytes = spec.ceiling_bytes
    # What a cap leaves over is no budget's, and serves for headroom.
    beyond_bytes = max(0, spec.total_bytes - spec.margin_bytes) - budget_bytes
    if words[w.H_SAMPLED_NS] > words[w.H_RETIRED_NS]:
        # Right after a death the budget is lower than what the next sample will find.
        budget_bytes = max(0, words[w.H_BUDGET])
        beyond_bytes = words[w.H_BEYOND]
    headroom_bytes = sum(
        max(0, t.headroom_bytes - taken_bytes.get(row, 0)) for row, t in rows.items()
    )
    wanted_bytes = sum(t.min_bytes for t in rows.values()) + max(0, headroom_bytes - beyond_bytes)
    if wanted_bytes <= budget_bytes:
        return
    table = "".join(
        f"\n  {row}: min {format_size(t.min_bytes)}, headroom {format_size(t.headroom_bytes)}"
        for row, t in sorted(rows.items())
        if t.min_bytes or t.headroom_bytes
    )
    raise LedgerError(
        f"mins and headroom on {ledger.spec.uuid} would come to {format_size(wanted_bytes)}, and "
        f"its budget is {format_size(budget_bytes)}; lower some of these (kvtide set NAME --min, "
        f"--headroom):{table}"
    )


def store_terms(words: memoryview, at: int, terms: Terms) -> None:
    """Write terms into a record."""
    words[at + w.I_LIMIT] = w.NONE if terms.limit_bytes is None else terms.limit_bytes
    words[at + w.I_MIN] = terms.min_bytes
    words[at + w.I_PRIORITY] = terms.priority
    words[at + w.I_HEADROOM] = terms.headroom_bytes


def change_terms(
    ledger: Ledger, name: str, change: Callable[[Terms], Terms], revision: int | None
) -> tuple[Terms, int]:
    """Set an instance's terms from what they were, and wake whom it concerns.

    Returns
    -------
    (Terms, int)
        As they are now, and their revision.

    Raises
    ------
    StaleRevisionError
        The revision is not the current one.
    NoInstanceError
        No instance has this name.
    LedgerError
        The budget does not back the mins any more.
    UsageError
        The terms cannot be had, or the limit is below what the instance can never give back.
    """
    with ledger.file.change() as words:
        slot = _find(ledger, words, name)
        at = w.instance_at(slot)
        before = terms_of(words, slot)
        current: int = words[at + w.I_REVISION]
        if revision is not None and revision != current:
            raise StaleRevisionError(
                f"the terms of {name!r} are {_text(before)} at revision {current}, and this change "
                f"was made against revision {revision}; look again and repeat it"
            )
        terms = change(before)
        check_terms(terms)
        pinned_bytes = _pinned_bytes(words, slot)
        if terms.limit_bytes is not None and terms.limit_bytes < pinned_bytes:
            raise UsageError(
                f"a limit of {format_size(terms.limit_bytes)} is below what {name!r} can never "
                f"give back; the smallest that works is {format_size(pinned_bytes)}"
            )
        if terms.min_bytes > before.min_bytes or terms.headroom_bytes > before.headroom_bytes:
            check_mins(ledger, words, name, slot, terms)
        # The revision first: dying here makes a caller look again, never overwrite.
        words[at + w.I_REVISION] = current + 1
        store_terms(words, at, terms)
        concerned = [(slot, words[at]), *waiting(words, slot)]
    _ring(ledger, concerned)
    return terms, current + 1


def ask_to_trim(ledger: Ledger, name: str, to_bytes: int, *, running: bool) -> int:
    """Ask an instance to give back down to a size what it holds idle, or what it holds at all.

    It is carried out once, at its next step; growth goes on afterwards.

    Returns
    -------
    int
        What it will come to at least: what it can never give back is not asked for.

    Raises
    ------
    NoInstanceError
        No instance has this name.
    UsageError
        The size cannot be one.
    """
    if not 0 <= to_bytes < _MAX_BYTES:
        raise UsageError(f"nothing can be trimmed to {to_bytes} bytes")
    with ledger.file.change() as words:
        slot = _find(ledger, words, name)
        at = w.instance_at(slot)
        to_bytes = max(to_bytes, _pinned_bytes(words, slot))
        words[at + w.I_TRIM_TO] = to_bytes
        words[at + w.I_TRIM_RUNNING] = int(running)
        words[at + w.I_TRIM_ASKED] += 1
        concerned = [(slot, words[at])]
    _ring(ledger, concerned)
    return to_bytes


def _ring(ledger: Ledger, concerned: list[tuple[int, int]]) -> None:
    """Wake these, and all who should give something now."""
    words = ledger.file.words
    called = [(slot, words[w.instance_at(slot)]) for slot in demands_now(words)]
    ledger.bell.ring(dict.fromkeys([*concerned, *called]))


def _pinned_bytes(words: memoryview, slot: int) -> int:
    return sum(words[w.pool_at(s) + w.P_PINNED] for s in pools_of(words, slot))


def _find(ledger: Ledger, words: memoryview, name: str) -> int:
    names = {}
    for slot in live_instances(words):
        at = w.instance_at(slot)
        names[w.get_text(ledger.file.raw, at + w.I_NAME, w.NAME_BYTES)] = slot
    if name not in names:
        there = ", ".join(sorted(names)) or "none at all"
        raise NoInstanceError(f"no instance {name!r} on {ledger.spec.uuid}; there is {there}")
    return names[name]


def _text(terms: Terms) -> str:
    limit = "none" if terms.limit_bytes is None else format_size(terms.limit_bytes)
    return (
        f"limit {limit}, min {format_size(terms.min_bytes)}, priority {terms.priority}, headroom "
        f"{format_size(terms.headroom_bytes)}"
    )
