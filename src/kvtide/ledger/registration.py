"""New records: an instance under its name, a pool under its instance."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from kvtide.errors import LedgerError, NameTakenError, UsageError
from kvtide.ledger import layout as w
from kvtide.ledger.creation import difference, spec_of
from kvtide.ledger.records import Terms
from kvtide.ledger.retirement import live_instances, live_pools, pools_of
from kvtide.ledger.steering import check_mins, check_terms, store_terms
from kvtide.settings import check_name

if TYPE_CHECKING:
    from kvtide.ledger.instance import Instance
    from kvtide.ledger.ledger import Ledger

__all__ = ["add_instance", "add_pool"]

_DYING_S: Final = 5.0
_LONGEST_NAP_S: Final = 0.25
_MAX_BYTES: Final = 1 << 62


def add_instance(ledger: Ledger, name: str, terms: Terms, *, explicit: bool) -> tuple[int, int]:
    """Bring an instance's record to life under a lease; its slot and generation."""
    check_name(name)
    check_terms(terms)
    deadline = time.monotonic() + _DYING_S
    nap_s = 0.01
    while True:
        ledger.retire_dead()
        with ledger.file.change() as words:
            _check_device(ledger)
            holders = _holders(ledger, words)
            free_name = name
            if name in holders:
                pid, dying = holders[name]
                if dying and time.monotonic() < deadline:
                    free_name = ""
                elif explicit:
                    what = "is ending, slowly, in" if dying else "is live in"
                    raise NameTakenError(
                        f"an instance named {name!r} {what} process {pid}; end that one, or give "
                        "this one another name (KVTIDE_NAME)"
                    )
                else:
                    number = 2
                    while (free_name := f"{name}-{number}") in holders:
                        number += 1
                    check_name(free_name)
            if free_name:
                if terms.min_bytes or terms.headroom_bytes:
                    check_mins(ledger, words, free_name, None, terms)
                born = _bear_instance(ledger, words, free_name, terms)
                live = {(s, words[w.instance_at(s)]) for s in live_instances(words)}
                break
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    ledger.bell.sweep_all_but(live)
    return born


def _holders(ledger: Ledger, words: memoryview) -> dict[str, tuple[int, bool]]:
    """Names in use: the process to talk about, and whether its owner is dead already."""
    holders = {}
    for slot in live_instances(words):
        at = w.instance_at(slot)
        name = w.get_text(ledger.file.raw, at + w.I_NAME, w.NAME_BYTES)
        dying = not ledger.file.is_leased(at)
        pools = pools_of(words, slot)
        record = w.pool_at(pools[0]) + w.P_PID if dying and pools else at + w.I_PID
        holders[name] = (words[record], dying)
    return holders


def _bear_instance(ledger: Ledger, words: memoryview, name: str, terms: Terms) -> tuple[int, int]:
    slot = _lease_free_record(ledger, words, w.INSTANCES_AT, w.MAX_INSTANCES)
    if slot is None:
        raise LedgerError(
            f"the ledger {ledger.path} is full: {w.MAX_INSTANCES} instances are live; end some"
        )
    at = w.instance_at(slot)
    _clear(words, at)
    words[at + w.I_PID] = os.getpid()
    store_terms(words, at, terms)
    words[at + w.I_REVISION] = 1
    w.put_text(ledger.file.raw, at + w.I_NAME, w.NAME_BYTES, name)
    _enliven(words, at, w.H_INSTANCES_HIGH, slot)
    return slot, words[at]


def add_pool(
    ledger: Ledger,
    instance: Instance,
    pool_name: str,
    rank: int,
    blocks_total: int,
    block_bytes: int,
) -> tuple[int, int]:
    """Bring a pool's record to life under a lease of this process; its slot and generation."""
    check_name(pool_name)
    if rank < 0 or blocks_total < 0 or block_bytes < 1 or blocks_total * block_bytes >= _MAX_BYTES:
        raise UsageError(
            f"no pool has rank {rank} and {blocks_total} blocks of {block_bytes} bytes"
        )
    ledger.file.check_whole()
    if len(live_pools(ledger.file.words)) == w.MAX_POOLS:
        ledger.retire_dead()
    with ledger.file.change() as words:
        _check_device(ledger)
        if not instance.live:
            raise LedgerError(f"instance {instance.name!r} was retired: it cannot have pools")
        slot = _lease_free_record(ledger, words, w.POOLS_AT, w.MAX_POOLS)
        if slot is None:
            raise LedgerError(
                f"the ledger {ledger.path} is full: {w.MAX_POOLS} pools are live; end some engines"
            )
        at = w.pool_at(slot)
        _clear(words, at)
        words[at + w.P_PID] = os.getpid()
        words[at + w.P_INSTANCE] = instance.slot
        words[at + w.P_RANK] = rank
        words[at + w.P_BLOCKS_TOTAL] = blocks_total
        words[at + w.P_BLOCK_BYTES] = block_bytes
        w.put_text(ledger.file.raw, at + w.P_NAME, w.NAME_BYTES, pool_name)
        _enliven(words, at, w.H_POOLS_HIGH, slot)
        return slot, words[at]


def _check_device(ledger: Ledger) -> None:
    """The file may have been made anew, for other settings, while this process had no record."""
    why = difference(spec_of(ledger.file.raw), ledger.spec)
    if why is not None:
        raise LedgerError(f"the ledger {ledger.path} was made anew by others: {why}")


def _lease_free_record(ledger: Ledger, words: memoryview, table_at: int, slots: int) -> int | None:
    """Take the lease of a free record; its slot, or None where there is none.

    One whose lease another process has is passed over: of a process that dies the kernel drops the
    lock before the leases, and one that was interrupted before its record lived may live on.
    """
    end = table_at + slots * w.RECORD_WORDS
    generations = words[table_at : end : w.RECORD_WORDS].tolist()
    for slot, generation in enumerate(generations):
        if not generation & 1 and ledger.file.take_lease(table_at + slot * w.RECORD_WORDS):
            return slot
    return None


def _clear(words: memoryview, at: int) -> None:
    for word in range(at + 1, at + w.RECORD_WORDS):
        words[word] = 0


def _enliven(words: memoryview, at: int, high_at: int, slot: int) -> None:
    """After the lease the hint, then life: dying in between leaves a free record."""
    words[high_at] = max(words[high_at], slot + 1)
    words[at] += 1
