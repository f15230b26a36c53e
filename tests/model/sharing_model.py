"""Who gets memory, as a model: limits, mins, reservations, pressure, devices and ranks.

What is decided, the ledger's own pure policy decides here too; the model is of who does what when:
a growth is granted device by device, mapped rank by rank, counted when all have it, undone whole;
who is refused wishes, looks once more and sleeps; who holds is called, gives and refunds; and
anybody may die in between. A block is one granule of every device of its engine. How budgets are
sampled is the other model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.ledger.policy import Holding, judge, set_aside
from kvtide.ledger.sharing import demands
from ledger_invariants import (
    charges_never_above_published_budget_by_a_grant,
    live_owner_never_retired,
    require,
)

RUN, GRANT, MAP, UNDO = "run", "grant", "map", "undo"
REFUSED, WISHED, ASLEEP, RELEASE = "refused", "wished", "asleep", "release"
ALIVE, DEAD, GONE = range(3)
NONE, RESERVED, READY, LOADED = range(4)


class Engine(NamedTuple):
    """`charge` and `held` are by its devices; `done` are the ranks that made the step's part.

    `since` orders the wishes; `bell` is a wake-up that waits; `back` is where it goes on after it
    has given a block; `loading` is what it reserves beside its pools on its first device;
    `passing` says that it was refused while another was between the grants of two devices, which
    wakes nobody when it takes the first one back: only the bounded look by itself finds that.
    """

    life: int
    used: int
    idle: int
    charge: tuple[int, ...]
    held: tuple[int, ...]
    does: str = RUN
    done: int = 0
    want: int = 0
    wished: bool = False
    since: int = 0
    bell: bool = False
    back: str = RUN
    loading: int = NONE
    limit: int | None = None
    passing: bool = False


class Terms(NamedTuple):
    """What an engine was promised; `limits` are those that somebody may set while it runs."""

    devices: tuple[int, ...]
    most: int
    limits: tuple[int | None, ...] = (None,)
    min: int = 0
    priority: int = 0
    loads: bool = False


State = tuple[Engine, ...]


@dataclass(frozen=True)
class Sharing:
    """The devices, the engines and the rules; every flag that is not its default is a fault."""

    engines: tuple[Terms, ...]
    totals: tuple[int, ...]
    dies: bool = True
    faults: bool = True  # a rank's device may refuse what was granted
    limit_checked: bool = True
    budget_checked: bool = True
    refunds_on_refusal: bool = True
    undone_at_all_ranks: bool = True
    counted_when_all_have_it: bool = True
    refund_after_release: bool = True
    rings_on_refund: bool = True
    rings_on_limit: bool = True
    rings_on_wish_end: bool = True
    rings_on_retirement: bool = True
    wish_calls_holders: bool = True
    looks_once_more: bool = True
    looks_by_itself: bool = True
    reservation_off_budget: bool = True
    giver_keeps_its_min: bool = True
    sets_aside: bool = True
    lease_asked: bool = True

    @property
    def start(self) -> State:
        return tuple(
            Engine(ALIVE, 0, 0, (0,) * len(t.devices), (0,) * len(t.devices), limit=t.limits[0])
            for t in self.engines
        )

    def canonical(self, s: State) -> State:
        """Only the order of wishes matters."""
        order = sorted({e.since for e in s if e.wished})
        return tuple(
            e._replace(
                since=order.index(e.since) if e.wished else 0,
                passing=e.passing and e.wished and e.does == ASLEEP,
            )
            if e.life != GONE
            else e._replace(
                used=0,
                idle=0,
                does=RUN,
                done=0,
                want=0,
                wished=False,
                since=0,
                bell=False,
                back=RUN,
            )
            for e in s
        )

    # ---- figures ----

    def at(self, e: Engine, i: int, d: int, what: str) -> int:
        devices = self.engines[i].devices
        return getattr(e, what)[devices.index(d)] if d in devices else 0

    def budget(self, s: State, d: int) -> int:
        off = 0
        for i, e in enumerate(s):
            if self.engines[i].devices[0] == d:
                off += e.loading == LOADED or (
                    e.loading in (RESERVED, READY) and self.reservation_off_budget
                )
        return self.totals[d] - off

    def free(self, s: State, d: int) -> int:
        beside = sum(
            e.loading == LOADED and self.engines[i].devices[0] == d for i, e in enumerate(s)
        )
        return self.totals[d] - beside - sum(self.at(e, i, d, "held") for i, e in enumerate(s))

    def charged(self, s: State, d: int) -> int:
        return sum(self.at(e, i, d, "charge") for i, e in enumerate(s) if e.life != GONE)

    def holding(self, s: State, i: int, d: int) -> Holding:
        e, terms = s[i], self.engines[i]
        charge = self.at(e, i, d, "charge")
        releasing = 1 if e.does == RELEASE else 0
        coming = max(0, charge - e.used - e.idle - releasing)
        return Holding(
            slot=i,
            charged_bytes=charge,
            limit_bytes=e.limit,
            # What is on its way in is nobody's to take yet: it is pinned for this moment.
            idle_bytes=min(e.idle, charge) if e.life == ALIVE else 0,
            releasing_bytes=releasing,
            pinned_bytes=coming,
            wish_bytes=e.want if e.wished and e.life == ALIVE else 0,
            least_bytes=e.want,
            wish_since_ns=e.since,
            wish_is_ripe=True,
            min_bytes=terms.min if e.life == ALIVE else 0,
            priority=terms.priority,
            loading_bytes=int(e.loading in (RESERVED, READY) and terms.devices[0] == d),
        )

    def holdings(self, s: State, d: int) -> list[Holding]:
        return [
            self.holding(s, i, d)
            for i, e in enumerate(s)
            if e.life != GONE and d in self.engines[i].devices
        ]

    def demanded(self, s: State, i: int) -> tuple[int, int]:
        """The largest demand that an engine finds on any of its devices: idle, running."""
        idle = running = 0
        for d in self.engines[i].devices:
            holdings = self.holdings(s, d)
            if not self.giver_keeps_its_min:
                holdings = [h._replace(min_bytes=0) if not h.wish_bytes else h for h in holdings]
            found = demands(
                holdings, budget_bytes=self.budget(s, d), granularity_bytes=1, beyond_bytes=0
            ).get(i)
            if found is not None:
                idle, running = max(idle, found.idle_bytes), max(running, found.running_bytes)
        return idle, running

    def verdict(self, s: State, i: int, d: int) -> bool:
        """Whether one block may be charged on a device, by the real policy."""
        e = s[i]
        charged = self.charged(s, d)
        wishers = [h for h in self.holdings(s, d) if h.wish_bytes and h.slot != i]
        pinned = sum(h.pinned_bytes for h in self.holdings(s, d))
        aside = 0
        if self.sets_aside:
            aside = set_aside(
                1, self.holding(s, i, d), wishers, lendable_bytes=self.budget(s, d) - pinned
            )
        own = self.at(e, i, d, "charge")
        verdict = judge(
            1,
            budget_bytes=self.budget(s, d) if self.budget_checked else 99,
            charged_bytes=charged,
            limit_bytes=e.limit if self.limit_checked else None,
            instance_charged_bytes=own,
            withheld_bytes=aside,
        )
        if verdict.reason is not None:
            return False
        charges_never_above_published_budget_by_a_grant(self.budget(s, d), charged + 1)
        within = e.limit is None or own + 1 <= e.limit
        require("limit_never_exceeded_by_a_grant", within, (i, own, e.limit))
        room = self.budget(s, d) - charged - 1
        if own + 1 > self.engines[i].min:
            waits = sum(
                min(h.wanted_bytes(), h.below_min_bytes)
                for h in wishers
                if h.wanted_bytes() <= self.budget(s, d) - h.charged_bytes
            )
            require("nobody_overtakes_a_min_that_waits", waits <= room, (i, d, s))
        return True

    def grantable(self, s: State, i: int) -> bool:
        return all(self.verdict(s, i, d) for d in self.engines[i].devices)

    # ---- what must hold in every state ----

    def check(self, s: State) -> None:
        for i, e in enumerate(s):
            if e.life == ALIVE:
                backed = all(h >= e.used + e.idle for h in e.held)
                require("no_block_without_all_ranks", backed, (i, e))
                owned = all(h <= c for h, c in zip(e.held, e.charge, strict=True))
                require("every_byte_has_an_owner", owned, (i, e))
        for d in range(len(self.totals)):
            require("nothing_is_used_twice", self.free(s, d) >= 0, (d, s))
        if not any(True for _ in self.protocol(s)):
            self.check_quiet(s)

    def check_quiet(self, s: State) -> None:
        """Nothing goes on by itself any more, until somebody asks for something."""
        for i, e in enumerate(s):
            if e.life != ALIVE:
                continue
            exact = all(h == c == e.used + e.idle for h, c in zip(e.held, e.charge, strict=True))
            require("nothing_granted_is_forgotten", exact, (i, e))
            if e.wished:
                require("every_waiter_is_woken_or_told", not self.grantable(s, i), (i, s))
                if max(e.charge) < self.engines[i].min and self._mins_backed(s):
                    within = e.limit is None or max(e.charge) < e.limit
                    require("a_min_can_always_be_had_back", not within, (i, s))
            # Who sleeps does not look by itself: it must have been called.
            require("every_holder_is_called", not self.demanded(s, i)[0], (i, s))

    def _mins_backed(self, s: State) -> bool:
        return all(
            sum(
                max(t.min, 0)
                for i, t in enumerate(self.engines)
                if d in t.devices and s[i].life == ALIVE
            )
            <= self.budget(s, d)
            for d in range(len(self.totals))
        )

    # ---- what happens by itself ----

    def steps(self, s: State) -> Iterator[tuple[str, State]]:
        yield from self.protocol(s)
        yield from self.events(s)

    def protocol(self, s: State) -> Iterator[tuple[str, State]]:
        for i, e in enumerate(s):
            if e.life == DEAD or (e.life == ALIVE and not self.lease_asked):
                yield f"someone retires {i}", self._retired(s, i)
            if e.life == ALIVE:
                yield from self._goes_on(s, i, e)

    def _goes_on(self, s: State, i: int, e: Engine) -> Iterator[tuple[str, State]]:
        devices = self.engines[i].devices
        if e.does == RUN or (e.does == ASLEEP and e.bell):
            gives = list(self._gives(s, i, e))
            if gives:
                yield from gives
                return
        if e.does == RUN and e.want:
            if e.idle:
                own = _put(s, i, idle=e.idle - 1, used=e.used + 1, want=0, wished=False)
                rings = e.wished and self.rings_on_wish_end
                yield f"{i} uses its own", self._ring_waiters(own, i, rings)
            else:
                yield f"{i} asks", _put(s, i, does=GRANT, done=0)
        elif e.does == RUN and not e.used:
            yield f"{i} has nothing to do", _put(s, i, does=ASLEEP, bell=False)
        elif e.does == ASLEEP and e.bell:
            yield f"{i} is woken", _put(s, i, does=RUN if e.want else ASLEEP, bell=False)
        elif e.does == ASLEEP and e.passing and self.looks_by_itself:
            yield f"{i} looks by itself", _put(s, i, does=GRANT, done=0, passing=False)
        elif e.does == REFUSED:
            yield f"{i} wishes", self._wishes(s, i)
        elif e.does == WISHED:
            again = GRANT if self.looks_once_more else ASLEEP
            yield f"{i} looks once more", _put(s, i, does=again, done=0)
        elif e.does == GRANT:
            yield from self._grants(s, i, e)
        elif e.does == MAP:
            yield from self._maps(s, i, e)
        elif e.does == UNDO:
            yield from self._undoes(s, i, e)
        elif e.does == RELEASE:
            for rank in range(len(devices)):
                if not e.done >> rank & 1:
                    after = _put(s, i, held=_add(e.held, rank, -1), done=e.done | 1 << rank)
                    yield f"{i} releases at rank {rank}", after
            if e.done == (1 << len(devices)) - 1:
                charge = tuple(c - 1 for c in e.charge) if self.refund_after_release else e.charge
                after = _put(s, i, charge=charge, done=0, does=e.back, bell=True)
                yield f"{i} refunds", self._ring_waiters(after, i, self.rings_on_refund)
        if e.loading in (RESERVED, READY) and e.does in (RUN, ASLEEP):
            d = devices[0]
            # It waits until the ledger has the room; what it takes after that must be there.
            room = self.budget(s, d) - self.charged(s, d) - (not self.reservation_off_budget)
            if e.loading == RESERVED and room >= 0:
                yield f"{i} finds room to load", _put(s, i, loading=READY)
            elif e.loading == READY:
                held = sum(self.at(x, j, d, "held") for j, x in enumerate(s))
                there = self.free(s, d) - max(0, self.charged(s, d) - held) >= 1
                require("what_is_being_loaded_is_not_lent", there, (i, s))
                yield f"{i} loads", _put(s, i, loading=LOADED)

    def _gives(self, s: State, i: int, e: Engine) -> Iterator[tuple[str, State]]:
        idle, running = self.demanded(s, i)
        if idle and e.idle:
            yield f"{i} gives a block", self._release(s, i, idle=e.idle - 1)
        elif running and e.used:
            kept = e.used + e.idle - 1 >= self.engines[i].min or e.limit is not None
            require("no_min_is_taken_from_who_runs", kept, (i, s))
            yield f"{i} preempts", self._release(s, i, used=e.used - 1, want=1)

    def _release(self, s: State, i: int, **changes: object) -> State:
        e = s[i]
        if not self.refund_after_release:
            changes["charge"] = tuple(c - 1 for c in e.charge)
        # After an engine has given it looks again, asleep or not.
        return _put(s, i, does=RELEASE, done=0, back=e.does, **changes)

    def _grants(self, s: State, i: int, e: Engine) -> Iterator[tuple[str, State]]:
        """Device by device; `done` counts those that have granted."""
        devices = self.engines[i].devices
        if e.done == len(devices):
            yield f"{i} orders its ranks to map", _put(s, i, does=MAP, done=0)
        elif self.verdict(s, i, devices[e.done]):
            charge = _add(e.charge, e.done, 1)
            yield f"{i} is granted on {devices[e.done]}", _put(s, i, charge=charge, done=e.done + 1)
        else:
            charge = e.charge
            if self.refunds_on_refusal:
                charge = tuple(c - (n < e.done) for n, c in enumerate(charge))
            s = _put(s, i, charge=charge, done=0)
            if e.wished:
                passing = any(
                    x.does == GRANT and x.done and j != i and x.life == ALIVE
                    for j, x in enumerate(s)
                )
                asleep = _put(s, i, does=ASLEEP, passing=passing)
                yield f"{i} is refused again and sleeps", asleep
            else:
                yield f"{i} is refused", _put(s, i, does=REFUSED)

    def _wishes(self, s: State, i: int) -> State:
        newest = max((e.since for e in s if e.wished), default=0)
        s = _put(s, i, wished=True, since=newest + 1, does=WISHED)
        return self._call_holders(s, i) if self.wish_calls_holders else s

    def _maps(self, s: State, i: int, e: Engine) -> Iterator[tuple[str, State]]:
        devices = self.engines[i].devices
        whole = (1 << len(devices)) - 1
        if e.done == whole or (e.done and not self.counted_when_all_have_it):
            grown = _put(s, i, does=RUN, done=0, used=e.used + 1, want=0, wished=False, bell=False)
            yield (
                f"{i} counts its block",
                self._ring_waiters(grown, i, e.wished and self.rings_on_wish_end),
            )
            return
        for rank, d in enumerate(devices):
            if e.done >> rank & 1:
                continue
            if self.free(s, d) > 0:
                after = _put(s, i, held=_add(e.held, rank, 1), done=e.done | 1 << rank)
                yield f"{i} maps at rank {rank}", after
            if self.faults or self.free(s, d) <= 0:
                yield f"rank {rank} of {i} cannot map", _put(s, i, does=UNDO)

    def _undoes(self, s: State, i: int, e: Engine) -> Iterator[tuple[str, State]]:
        for rank in range(len(self.engines[i].devices)):
            if e.done >> rank & 1 and self.undone_at_all_ranks:
                after = _put(s, i, held=_add(e.held, rank, -1), done=e.done & ~(1 << rank))
                yield f"rank {rank} of {i} undoes", after
        if not e.done or not self.undone_at_all_ranks:
            stuck = e.done
            charge = tuple(c - (not stuck >> n & 1) for n, c in enumerate(e.charge))
            after = _put(s, i, charge=charge, done=0, does=RUN, want=0, wished=False)
            yield f"{i} makes do without", self._ring_waiters(after, i, self.rings_on_refund)

    # ---- what others do ----

    def events(self, s: State) -> Iterator[tuple[str, State]]:
        for i, e in enumerate(s):
            terms = self.engines[i]
            if e.life == DEAD:
                for rank, held in enumerate(e.held):
                    if held:
                        after = _put(s, i, held=_add(e.held, rank, -1))
                        yield f"the driver frees memory of {i}", after
            if e.life != ALIVE:
                continue
            if e.does in (RUN, ASLEEP) and not e.want and e.used + e.idle < terms.most:
                yield f"a request comes to {i}", _put(s, i, want=1, does=RUN, bell=False)
            if e.does == ASLEEP and not e.want and e.idle:
                yield f"a request meets the cache of {i}", _put(s, i, want=1, does=RUN, bell=False)
            if e.does == RUN and e.used:
                yield f"a request of {i} ends", _put(s, i, used=e.used - 1, idle=e.idle + 1)
            if terms.loads and e.loading == NONE and e.does == ASLEEP:
                yield f"{i} reserves", self._call_holders(_put(s, i, loading=RESERVED), i)
            for limit in terms.limits:
                if limit != e.limit:
                    after = _put(s, i, limit=limit)
                    if self.rings_on_limit:
                        after = self._call_holders(_put(after, i, bell=True), i)
                    yield (
                        f"the limit of {i} is {limit}",
                        self._ring_waiters(after, i, self.rings_on_limit),
                    )
            if self.dies:
                # Its leases go; what its ranks held the driver frees in its own time.
                yield f"{i} is killed", _put(s, i, life=DEAD, want=0, wished=False, does=RUN)

    def _retired(self, s: State, i: int) -> State:
        e = s[i]
        live_owner_never_retired(e.life == ALIVE)
        # What it holds still is no credit: the budget is lowered by it until it is freed.
        if any(e.held):
            return s
        gone = _put(s, i, life=GONE, charge=(0,) * len(e.charge), loading=NONE)
        return self._ring_waiters(gone, i, self.rings_on_retirement)

    def _ring_waiters(self, s: State, i: int, rings: bool) -> State:
        if rings:
            for j, e in enumerate(s):
                if j != i and e.life == ALIVE and e.wished:
                    s = _put(s, j, bell=True)
        return s

    def _call_holders(self, s: State, i: int) -> State:
        for j, e in enumerate(s):
            if (
                e.life == ALIVE
                and (j != i or s[i].loading == RESERVED)
                and any(self.demanded(s, j))
            ):
                s = _put(s, j, bell=True)
        return s


def _add(values: tuple[int, ...], index: int, by: int) -> tuple[int, ...]:
    return (*values[:index], values[index] + by, *values[index + 1 :])


def _put(s: State, i: int, **changes: object) -> State:
    return (*s[:i], s[i]._replace(**changes), *s[i + 1 :])
