"""Instances on paper that ask, wait, give and end, decided by the ledger's pure policy alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.ledger.policy import Holding, judge, set_aside
from kvtide.ledger.sharing import demands


@dataclass
class Engine:
    """What one instance holds and wants, in granules; `want` is its unmet wish."""

    slot: int
    priority: int = 0
    min: int = 0
    limit: int | None = None
    headroom: int = 0
    pinned: int = 0
    running: int = 0
    idle: int = 0
    loading: int = 0
    want: int = 0
    since: int = 0
    silent: bool = False

    @property
    def charged(self) -> int:
        return self.pinned + self.running + self.idle


@dataclass
class World:
    """`total` granules on the device; what is being loaded is really taken from it.

    `cap`: the most that is lent of them.
    """

    total: int
    engines: list[Engine] = field(default_factory=list)
    now: int = 0
    cap: int | None = None

    @property
    def there(self) -> int:
        """Less what is reserved and not loaded."""
        return self.total - sum(e.loading for e in self.engines)

    @property
    def budget(self) -> int:
        """As samples publish it."""
        return self.there if self.cap is None else min(self.there, self.cap)

    @property
    def beyond(self) -> int:
        return self.there - self.budget

    @property
    def charged(self) -> int:
        return sum(e.charged for e in self.engines)

    @property
    def headroom(self) -> int:
        """What must be left of the budget."""
        return max(0, sum(e.headroom for e in self.engines) - self.beyond)

    def holding(self, e: Engine) -> Holding:
        return Holding(
            slot=e.slot,
            charged_bytes=e.charged,
            limit_bytes=e.limit,
            idle_bytes=e.idle,
            wish_bytes=e.want,
            least_bytes=e.want,
            wish_since_ns=e.since,
            wish_is_ripe=self.now - e.since > 20,
            pinned_bytes=e.pinned,
            min_bytes=e.min,
            priority=e.priority,
            headroom_bytes=e.headroom,
            loading_bytes=e.loading,
            silent=e.silent,
        )

    def ask(self, e: Engine, size: int) -> bool:
        """Own idle memory first, then a grant, or else a wish."""
        self.now += 1
        own = min(e.idle, size)
        if own == size:
            e.idle, e.running, e.want = e.idle - own, e.running + own, 0
            return True
        size -= own
        wishers = [self.holding(w) for w in self.engines if w.want and w is not e]
        lendable = self.budget - self.headroom - sum(w.pinned for w in self.engines)
        aside = set_aside(size, self.holding(e), wishers, lendable_bytes=lendable)
        verdict = judge(
            size,
            budget_bytes=self.budget,
            charged_bytes=self.charged,
            limit_bytes=e.limit,
            instance_charged_bytes=e.charged,
            withheld_bytes=self.headroom + aside,
        )
        if verdict.reason is None:
            before = self.charged
            e.idle, e.running, e.want = e.idle - own, e.running + size + own, 0
            assert self.charged <= self.budget - self.headroom, "granted above the budget"
            assert e.limit is None or e.charged <= e.limit, "granted above the limit"
            assert self.charged == before + size
            return True
        if not e.want:
            e.since = self.now
        e.want = max(size, e.want)
        return False

    def demanded(self) -> dict[int, tuple[int, int]]:
        found = demands(
            [self.holding(e) for e in self.engines],
            budget_bytes=self.budget,
            granularity_bytes=1,
            beyond_bytes=self.beyond,
        )
        return {slot: tuple(demand) for slot, demand in found.items()}

    def answer(self) -> bool:
        """All who are called give what is demanded; whether anybody gave."""
        self.now += 1
        asked = self.demanded()
        for e in self.engines:
            idle, running = asked.get(e.slot, (0, 0))
            assert idle <= e.idle
            assert running <= e.running
            assert not (e.silent and (idle or running)), "asked one who does not answer"
            above_min = max(0, e.charged - e.min)
            over = 0 if e.limit is None else max(0, e.charged - e.limit)
            if self.holding(e).wanted_bytes():  # what is beyond its limit it does not wait for
                assert idle + running <= max(above_min, over), "taken below its min while it wants"
            assert running <= max(above_min, over), "preempted below its min"
            e.idle -= idle
            e.running -= running
        return bool(asked)

    def settle(self) -> None:
        """Until nobody is asked to give any more."""
        for _ in range(100):
            if not self.answer():
                return
        raise AssertionError("they give for ever")
