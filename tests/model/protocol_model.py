"""The ledger's protocol as an explicit-state model: every interleaving, death at every point.

A slot is a pool: a record, a worker that holds the memory, and a scheduler, which outlives it, that
grants and refunds. Anyone retires the dead. What happens in one step here is one store, one driver
call, or one locked change of a single store. Changes of several stores are several steps under the
lock, and who makes them can die between any two; a worker's lock goes with it, its memory and its
lease in any order.

States are canonical: counters appear only as the differences that the protocol uses, so the set is
finite without bounding how often anything happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ledger_invariants import (
    Held,
    Truth,
    budget_never_above_what_was_there,
    charges_never_above_published_budget_by_a_grant,
    every_byte_has_an_owner,
    live_owner_never_retired,
    no_credit_before_release,
    older_sample_never_overwrites_newer,
)

NOBODY, ALIVE, DYING, DEAD = range(4)  # DYING: killed, its lease not dropped yet

IDLE = ("idle",)
CREATED = ("created",)  # in the driver, not in the counter yet
RELEASING = ("releasing",)  # in the counter, not in the driver yet
CLOSING = ("closing",)
RELEASED = ("released",)  # of a faulty protocol alone
# ("drawn", number, pools, created, removed): a ticket, with a bit for each pool live at the draw
# ("read", number, pools, created, removed, free, there): a sample; `there` is a ghost, the truth
# ("publish", number, budget): under the lock, as is ("closing",), the end of one's own record
# `State.ends` is (slot, charge lost or None), by its owner or by anyone who found it dead


class Slot(NamedTuple):
    """`net` is created less released; `owed` refunds are due, `stale` ones are a former life's."""

    life: int
    charge: int
    net: int
    held: int
    owed: int
    stale: int
    does: tuple


class State(NamedTuple):
    budget: int
    published: int  # the last published ticket's number
    stored: int  # ghost: the number of the ticket that the budget comes from
    zombies: int  # held in the driver by those whose records are gone
    foreign: int
    ends: tuple | None  # whose record is being ended, under the lock
    slots: tuple[Slot, ...]


EMPTY = Slot(NOBODY, 0, 0, 0, 0, 0, IDLE)


@dataclass(frozen=True)
class Protocol:
    """The device and the rules; every flag that is not its default is a fault, for control."""

    slots: int
    total: int
    margin: int = 0
    foreign: int = 0  # most foreign memory
    samplers: int = 9  # at once
    joins_again: bool = True
    refund_before_release: bool = False
    discard_on_removal: bool = True
    created_read_before: bool = True
    released_read_after: bool = True
    tickets_checked: bool = True
    ticket_before_budget: bool = True
    budget_before_charge: bool = True
    budget_falls_with_charge: bool = True
    lease_asked: bool = True
    sample_asks_leases: bool = True
    generation_checked: bool = True
    charged_before_create: bool = True
    released_counted_before: bool = True

    @property
    def start(self) -> State:
        return State(self.total - self.margin, 0, -1, 0, 0, None, (EMPTY,) * self.slots)

    def free(self, s: State) -> int:
        return self.total - s.foreign - s.zombies - sum(p.held for p in s.slots)

    def canonical(self, s: State) -> State:
        """One of the states that behave alike.

        Only the order of tickets matters; a sample that will be dropped may as well be dropped now;
        a budget below zero is as good as none, since nothing raises a budget but storing a new one.
        """
        slots = list(s.slots)
        numbers = {s.published, s.stored}
        for i, q in enumerate(slots):
            for_good = self.discard_on_removal  # a death seen now is a removal later
            if q.does[0] in ("drawn", "read") and for_good and self._is_doomed(s, q.does):
                slots[i] = q._replace(does=IDLE)
            elif q.does[0] in _TICKETS:
                numbers.add(q.does[1])
                slots[i] = q._replace(does=self._floored(q.does))
        rank = {number: n for n, number in enumerate(sorted(numbers))}
        for i, q in enumerate(slots):
            if q.does[0] in _TICKETS:
                slots[i] = q._replace(does=(q.does[0], rank[q.does[1]], *q.does[2:]))
        return State(
            max(0, s.budget),
            rank[s.published],
            rank[s.stored],
            s.zombies,
            s.foreign,
            s.ends,
            tuple(slots),
        )

    def _floored(self, does: tuple) -> tuple:
        """Counts so low that the budget is none anyhow are alike."""
        if does[0] == "publish":
            return (*does[:2], max(0, does[2]))
        return (*does[:3], max(-self.total, does[3]), *does[4:])

    def _is_doomed(self, s: State, ticket: tuple) -> bool:
        _, number, pools, _, removed, *_ = ticket
        return (
            (removed and self.discard_on_removal)
            or (number <= s.published and self.tickets_checked)
            or (
                self.sample_asks_leases
                and any(q.life == DEAD and pools >> j & 1 for j, q in enumerate(s.slots))
            )
        )

    # ---- what must hold in every state ----

    def check(self, s: State) -> None:
        records = [Held(p.life == ALIVE, p.charge, p.held) for p in s.slots if p.life != NOBODY]
        truth = Truth(s.budget, self.margin, self.free(s), records)
        every_byte_has_an_owner(truth)
        if not self.foreign:
            no_credit_before_release(truth)

    # ---- what can happen ----

    def steps(self, s: State) -> Iterator[tuple[str, State]]:
        locked = s.ends is not None or any(p.does[0] == "publish" for p in s.slots)
        if s.zombies:
            yield "the driver frees a zombie's memory", s._replace(zombies=s.zombies - 1)
        if s.foreign < self.foreign and self.free(s):
            yield "foreign memory grows", s._replace(foreign=s.foreign + 1)
        if s.foreign:
            yield "foreign memory shrinks", s._replace(foreign=s.foreign - 1)
        if s.ends is not None:
            yield from self._ending(s, *s.ends)
        for i, p in enumerate(s.slots):
            if not locked:
                if p.life == DEAD or (not self.lease_asked and p.life != NOBODY):
                    yield f"someone begins to retire {i}", _removed(s)._replace(ends=(i, None))
                yield from self._schedulers(s, i, p)
            if p.life == ALIVE:
                ends = None if p.does == CLOSING else s.ends
                yield f"{i} is killed", _put(s, i, life=DYING, does=IDLE)._replace(ends=ends)
                yield from self._memory(s, i, p)
                yield from self._sampling(s, i, p, locked)
                if p.does == IDLE and not p.held and not locked:
                    closing = _put(_removed(s), i, does=CLOSING)
                    yield f"{i} begins to close", closing._replace(ends=(i, None))
            elif p.life != NOBODY:
                if p.held:
                    yield f"the driver frees the memory of {i}", _put(s, i, held=p.held - 1)
                if p.life == DYING:
                    yield f"the lease of {i} drops", _put(s, i, life=DEAD)

    def _schedulers(self, s: State, i: int, p: Slot) -> Iterator[tuple[str, State]]:
        if p.life == NOBODY:
            if self.joins_again or p.stale == 0:
                yield f"{i} enrolls", _put(s, i, life=ALIVE)
        else:
            charged = sum(q.charge for q in s.slots)
            if charged + 1 <= s.budget:
                charges_never_above_published_budget_by_a_grant(s.budget, charged + 1)
                yield f"{i} is granted", _put(s, i, charge=p.charge + 1)
            if p.owed:
                yield f"{i} refunds", _put(s, i, charge=p.charge - 1, owed=p.owed - 1)
        if p.stale:
            lower = p.charge > 0 and not self.generation_checked
            yield f"{i} refunds late", _put(s, i, charge=p.charge - lower, stale=p.stale - 1)

    def _memory(self, s: State, i: int, p: Slot) -> Iterator[tuple[str, State]]:
        kind = p.does[0]
        if kind == "idle":
            may = p.charge - p.owed - p.held > 0 or not self.charged_before_create
            if may and self.free(s):
                yield f"{i} creates", _put(s, i, held=p.held + 1, does=CREATED)
            if p.held and p.net:
                owed = p.owed + self.refund_before_release
                counted = self._count_release(s, i) if self.released_counted_before else s
                yield f"{i} counts a release", _put(counted, i, owed=owed, does=RELEASING)
        elif kind == "created":
            yield f"{i} counts its create", _put(s, i, net=p.net + 1, does=IDLE)
        elif kind == "releasing":
            owed = p.owed + (not self.refund_before_release)
            then = IDLE if self.released_counted_before else RELEASED
            yield f"{i} releases", _put(s, i, held=p.held - 1, owed=owed, does=then)
            if not self.refund_before_release and self.released_counted_before:
                yield f"{i} fails to release", _put(s, i, net=p.net + 1, does=IDLE)
        elif kind == "released":
            yield f"{i} counts its release late", _put(self._count_release(s, i), i, does=IDLE)

    def _count_release(self, s: State, i: int) -> State:
        """`released` rises: so falls what samples under way, that read it last, will compute."""
        if self.released_read_after:
            s = _samplers(s, lambda d: (*d[:3], d[3] - 1, *d[4:]) if d[2] >> i & 1 else d)
        return _put(s, i, net=s.slots[i].net - 1)

    def _sampling(self, s: State, i: int, p: Slot, locked: bool) -> Iterator[tuple[str, State]]:
        kind = p.does[0]
        if kind == "idle" and not locked:
            if sum(q.does[0] in _TICKETS for q in s.slots) == self.samplers:
                return
            number = max([s.published, *(q.does[1] for q in s.slots if q.does[0] in _TICKETS)]) + 1
            created = sum(q.net for q in s.slots)
            pools = sum(1 << j for j, q in enumerate(s.slots) if q.life != NOBODY)
            yield f"{i} draws a ticket", _put(s, i, does=("drawn", number, pools, created, False))
        elif kind == "drawn":
            free = self.free(s)
            there = free + sum(q.held for q in s.slots if q.life != NOBODY) - self.margin
            yield f"{i} samples", _put(s, i, does=("read", *p.does[1:], free, there))
        elif kind == "read" and not locked:
            _, number, _, created, _, free, there = p.does
            if self._is_doomed(s, p.does):
                yield f"{i} drops its sample", _put(s, i, does=IDLE)
                return
            if not self.created_read_before:
                created = sum(q.net for q in s.slots)
            budget = min(created + free - self.margin, self.total - self.margin)
            budget_never_above_what_was_there(
                budget, there, sum(q.charge for q in s.slots if q.life == DYING)
            )
            first = s._replace(published=number) if self.ticket_before_budget else s
            if not self.ticket_before_budget:
                first = _store_budget(s, budget, number)
            yield f"{i} begins to publish", _put(first, i, does=("publish", number, budget))
        elif kind == "publish":
            _, number, budget = p.does
            if self.ticket_before_budget:
                s = _store_budget(s, budget, number)
            else:
                s = s._replace(published=number)
            yield f"{i} publishes", _put(s, i, does=IDLE)

    def _ending(self, s: State, i: int, lost: int | None) -> Iterator[tuple[str, State]]:
        """Ending a record: the budget is lowered, then the record is gone and with it its charge.

        The last two are one step: whoever takes the lock next finishes what a death between them
        leaves.
        """
        p = s.slots[i]
        if p.life != ALIVE:
            yield "who retires is killed", s._replace(ends=None)
        if self.budget_before_charge:
            if lost is None:
                charge = p.charge if self.budget_falls_with_charge else 0
                s = s._replace(budget=s.budget - charge, ends=(i, charge))
                yield f"the budget falls by the charge of {i}", s
            else:
                yield f"the record of {i} ends", _end(s, i)._replace(ends=None)
        elif p.life != NOBODY:
            yield f"the record of {i} ends first", _end(s, i)._replace(ends=(i, p.charge))
        else:
            s = s._replace(budget=s.budget - (lost or 0), ends=None)
            yield f"the budget falls late by the charge of {i}", s


def _end(s: State, i: int) -> State:
    p = s.slots[i]
    live_owner_never_retired(p.life == ALIVE and p.does != CLOSING)
    slots = list(s.slots)
    slots[i] = EMPTY._replace(stale=min(1, p.stale + p.owed))
    return s._replace(zombies=s.zombies + p.held, slots=tuple(slots))


_TICKETS = ("drawn", "read", "publish")


def _put(s: State, i: int, **changes: object) -> State:
    slots = list(s.slots)
    slots[i] = slots[i]._replace(**changes)
    return s._replace(slots=tuple(slots))


def _store_budget(s: State, budget: int, number: int) -> State:
    older_sample_never_overwrites_newer(s.stored, number)
    return s._replace(budget=budget, stored=number)


def _samplers(s: State, change) -> State:
    slots = tuple(
        q._replace(does=change(q.does)) if q.does[0] in ("drawn", "read") else q for q in s.slots
    )
    return s._replace(slots=slots)


def _removed(s: State) -> State:
    """A removal is counted: every sample under way will see it."""
    return _samplers(s, lambda d: (*d[:4], True, *d[5:]))
