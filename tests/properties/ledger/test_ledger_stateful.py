"""Anything that pools can do to a ledger, in any order, in one process, against the truth."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from kvtide.errors import LedgerError
from kvtide.ledger import Granted, Ledger, PoolFigures
from kvtide.ledger import layout as w
from kvtide.units import MIB
from ledger_invariants import (
    Held,
    Truth,
    charges_never_above_published_budget_by_a_grant,
    every_byte_has_an_owner,
    no_credit_before_release,
)
from ledger_world import TOTAL, spec

sizes = st.sampled_from([0, 1, 2 * MIB, 60 * MIB, TOTAL // 2, TOTAL, TOTAL + 1])
MARGIN = 4 * MIB


class Pool:
    """A pool, its own open ledger, as if in its own process, and what it really holds."""

    def __init__(self, machine, limit) -> None:
        self.ledger = Ledger.open(machine.directory, spec(margin_bytes=MARGIN))
        self.machine = machine
        self.instance = self.ledger.register("p", explicit=False, limit_bytes=limit)
        self.account = self.ledger.enroll(
            self.instance,
            pool_name="kv",
            rank=0,
            blocks_total=1,
            block_bytes=1,
            sampler=machine.sampled,
        )
        self.held = 0
        self.charge = 0
        # Beside its pool: announced and not taken yet, and taken.
        self.loading = 0
        self.beside = 0


class LedgerMachine(RuleBasedStateMachine):
    pools = Bundle("pools")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp()) / "kv"
        self.watch = Ledger.open(self.directory, spec(margin_bytes=MARGIN))
        # A lease of its own keeps the file from being made anew between examples' steps.
        self.watch.register("watch", explicit=True)
        self.all: list[Pool] = []
        self.zombies = 0
        self.during_sample = None

    def free(self) -> int:
        return TOTAL - self.zombies - sum(pool.held + pool.beside for pool in self.all)

    def loading(self) -> int:
        return sum(pool.loading for pool in self.all)

    def beside(self) -> int:
        return sum(pool.beside for pool in self.all)

    def sampled(self) -> int:
        act, self.during_sample = self.during_sample, None
        free = self.free()
        if act is not None:
            act()
        return free

    def teardown(self) -> None:
        for pool in self.all:
            pool.ledger.close()
        self.watch.close()
        shutil.rmtree(self.directory.parent)

    @precondition(lambda self: len(self.all) < 4)
    @rule(target=pools, limit=st.none() | sizes)
    def enroll(self, limit):
        pool = Pool(self, limit)
        self.all.append(pool)
        return pool

    @rule(pool=pools, size=sizes)
    def grant(self, pool, size):
        before = self.watch.snapshot()
        answer = pool.account.grant(size)
        limit = pool.instance.limit_bytes
        fits = before.charged_bytes + before.headroom_bytes + size <= max(0, self.budget())
        within = limit is None or pool.charge + size <= limit
        if isinstance(answer, Granted):
            pool.charge += size
            charges_never_above_published_budget_by_a_grant(
                self.budget(), self.watch.snapshot().charged_bytes
            )
            assert within
        else:
            # Nobody overtakes one who has waited for long, and examples may take long.
            others = [i for i in before.instances if i.key != pool.instance.key]
            assert not (fits and within) or any(i.wish_bytes for i in others)
            assert answer.available_bytes < size
            assert answer.reason == ("budget" if within else "limit")

    @rule(pool=pools)
    def create(self, pool):
        size = pool.charge - pool.held
        assert size <= self.free(), "what was granted is there"
        pool.held += size
        pool.account.created(size)

    @rule(pool=pools, parts=st.integers(1, 3))
    def release_and_refund(self, pool, parts):
        size = pool.held // parts
        pool.account.released(size)
        pool.held -= size
        pool.account.refund(size)
        pool.charge -= size

    @rule(pool=pools)
    def fail_to_release(self, pool):
        pool.account.released(pool.held)
        pool.account.created(pool.held)

    @rule(pool=pools)
    def refund_too_much(self, pool):
        try:
            pool.account.refund(pool.charge + 1)
        except LedgerError:
            return
        raise AssertionError("a refund above the charge was taken")

    @rule(pool=pools, other=pools, what=st.sampled_from(["nothing", "create", "release", "sample"]))
    def sample(self, pool, other, what):
        acts = {
            "create": lambda: self.create(other),
            "release": lambda: self.release_and_refund(other, 1),
            "sample": lambda: other.account.sample(),
        }
        self.during_sample = acts.get(what)
        assert pool.account.sample()
        if what == "nothing":
            taken = self.zombies + self.beside() + self.loading()
            assert self.budget() == TOTAL - taken - MARGIN

    @rule(pool=consumes(pools))
    def die(self, pool):
        """As the kernel does it: leases drop; the memory is the driver's to free, later."""
        pool.ledger.close()
        self.all.remove(pool)
        self.zombies += pool.held + pool.beside

    @rule(pool=consumes(pools))
    def close(self, pool):
        self.release_and_refund(pool, 1)
        self.zombies += pool.beside
        pool.account.close()
        pool.instance.close()
        pool.ledger.close()
        self.all.remove(pool)

    @rule()
    def retire(self):
        self.watch.retire_dead()
        assert self.watch.retire_dead() == 0

    @rule()
    def driver_frees(self):
        self.zombies = 0

    @rule(pool=pools, size=st.sampled_from([0, 2 * MIB, 60 * MIB]))
    def reserve(self, pool, size):
        pool.instance.reserve(size)
        pool.loading += size

    @rule(pool=pools, parts=st.integers(1, 3))
    def load(self, pool, parts):
        # An engine loads once there is room for it.
        size = pool.loading // parts
        if size <= self.free() - MARGIN - self.granted():
            pool.beside += size
            pool.loading -= size
            pool.instance.loaded(size)

    @rule(pool=pools)
    def measured(self, pool):
        pool.instance.measured(pool.beside, "torch")
        pool.loading = 0

    def granted(self) -> int:
        return sum(pool.charge - pool.held for pool in self.all)

    @rule(pool=pools, low=sizes, head=sizes, priority=st.integers(-1, 1))
    def terms(self, pool, low, head, priority):
        def change(t):
            most = low if t.limit_bytes is None else min(low, t.limit_bytes)
            return t._replace(min_bytes=most, headroom_bytes=head, priority=priority)

        try:
            self.watch.set_terms(pool.instance.name, change)
        except LedgerError as error:
            if "its budget is" not in str(error):
                raise

    @rule(pool=pools, limit=st.none() | sizes)
    def limit(self, pool, limit):
        (view,) = [i for i in self.watch.snapshot().instances if i.key == pool.instance.key]
        if limit is not None and limit < view.terms.min_bytes:
            return
        revision = pool.instance.limit_revision
        assert self.watch.set_limit(pool.instance.name, limit, revision) == revision + 1

    @rule(pool=pools, size=sizes, idle=sizes)
    def wish_and_demand(self, pool, size, idle):
        idle = min(idle, pool.held)
        pool.account.publish(PoolFigures(0, 0, 0, 0, idle))
        pool.instance.wish(size)
        for one in self.all:
            assert one.ledger.demand(one.instance) >= 0
        assert pool.ledger.demand(pool.instance) <= idle

    def budget(self) -> int:
        return self.watch.file.words[w.H_BUDGET]

    @invariant()
    def keeps_its_promises(self) -> None:
        words = self.watch.file.words
        alive = {pool.account.key: pool for pool in self.all}
        records = []
        for instance in self.watch.snapshot().instances:
            for view in instance.pools:
                pool = alive.pop(view.key, None)
                held = pool.held if pool else 0
                records.append(Held(pool is not None, view.charge_bytes, held))
                if pool:
                    assert view.mapped_bytes == held
                    assert view.charge_bytes == pool.charge
        assert not alive, "a live owner was retired"
        truth = Truth(self.budget(), MARGIN, self.free(), records)
        every_byte_has_an_owner(truth)
        no_credit_before_release(truth)
        room = max(0, self.budget() - sum(record.charge for record in records))
        granted = sum(record.charge - record.held for record in records if record.alive)
        assert room == 0 or room + granted + self.loading() <= max(0, self.free() - MARGIN), (
            "what is about to be loaded was lent"
        )
        assert not words[w.H_SEQUENCE] & 1
        ended = [at for at in map(w.pool_at, range(w.MAX_POOLS)) if not words[at] & 1]
        assert not any(words[at + w.P_CHARGE] for at in ended)


LedgerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, print_blob=True
)
TestLedger = LedgerMachine.TestCase
