"""The tide of one vLLM engine: around each step, what memory comes, goes or is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtide.engines.vllm import introduction
from kvtide.engines.vllm.blocks import ElasticBlockPool
from kvtide.engines.vllm.fitting import fits_regrouped, why_never
from kvtide.engines.vllm.foresight import Foresight
from kvtide.engines.vllm.need import Need
from kvtide.engines.vllm.overdue import Overdue
from kvtide.engines.vllm.preemption import Preemption
from kvtide.ledger import Ledger, State
from kvtide.memory.extents import cap_for
from kvtide.pool import Geometry, Pool, Strip
from kvtide.pool.plans import Run
from kvtide.ranks.endpoint import endpoint_of
from kvtide.ranks.growing import GrowingMemory
from kvtide.ranks.links import DirectLink, Link, SocketLink
from kvtide.ranks.messages import Description
from kvtide.ranks.ranks import Member, Ranks
from kvtide.ranks.seat import Seat
from kvtide.ranks.sockets import SchedulerSocket
from kvtide.ranks.watch import Watch
from kvtide.settings import Settings

__all__ = ["Tide"]

# How long free memory is kept by an engine that has nothing to do.
_LINGER_SECONDS = 0.5
# While memory is waited for: the first and the longest pause between two looks without a wake-up.
_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 0.25, 4.0
# While others wait and nobody calls: how often an engine with requests looks what it owes them.
_OWING_SECONDS = 0.05


class Tide:
    """Growth before a step, misses after it, and sleep while nothing can run.

    Parameters
    ----------
    scheduler
        vLLM's, just made; its block pool is adopted.

    Attributes
    ----------
    hopeless
        Requests that the engine must end, by their id, and why.
    asleep
        Nothing can run until memory comes.
    looks
        Whether this step may miss something: then each count of blocks is looked at.
    """

    def __init__(self, scheduler: Any) -> None:
        descriptions, wake_engine = introduction.take()
        manager = scheduler.kv_cache_manager
        self._scheduler = scheduler
        self._manager = manager
        watermark = manager.watermark_blocks / scheduler.kv_cache_config.num_blocks
        self._pool = ElasticBlockPool.adopt(manager.block_pool)
        self.memory = _connect(descriptions, self._pool)
        self._pool.memory = self.memory
        self._need = Need(scheduler)
        self._foresight = Foresight(scheduler, self.memory, self._pool.free, self._need, watermark)
        self._preemption = Preemption(scheduler, self.memory)
        self._overdue = Overdue(self.memory, Settings.from_environ().wait_deadline)
        self._shortfall = 0
        # Whether a growth for what this step missed was refused.
        self._refused = False
        # Whether nothing more can be given back until there is work again.
        self._lingered = False
        self.hopeless: dict[str, str] = {}
        self.asleep = False
        self._pressed = False
        self._owing_at = 0.0
        self._probe_seconds = _PROBE_SECONDS
        # Before this moment no further try to have what was missed, unless something was freed.
        self._missed_at = 0.0
        self._roused = threading.Event()
        wakers = [seat.instance.waker() for seat in self.memory.seats.values()]
        self._wake_engine: Callable[[], None] = wake_engine or self._roused.set
        self._waits_here = wake_engine is None
        ledgers = [seat.ledger for seat in self.memory.seats.values()]
        self.watch = Watch(wakers, ledgers, self._wake_engine)
        self._measure_allocations(manager.coordinator)
        self.memory.show(State.SLEEPING)

    def _measure_allocations(self, coordinator: Any) -> None:
        """See every count that vLLM is about to check against the free blocks."""
        original = coordinator.get_num_blocks_to_allocate
        free_count = self._pool.get_num_free_blocks
        memory = self.memory
        direct = memory.ranks.direct

        def get_num_blocks_to_allocate(*args: Any, **kwargs: Any) -> int:
            needed: int = original(*args, **kwargs)
            # The last check of a step stands: an earlier miss was mended by preemption.
            self._shortfall = missing = needed - free_count()
            if missing > 0 and direct and time.monotonic() >= self._missed_at:
                # One request asks, but the whole step is held up: all that it needs is wished for.
                desired = max(missing, self._need.blocks() - free_count())
                self._refused = not memory.grow_for(missing, desired)
                if self._refused:
                    self._missed_at = time.monotonic() + self._probe_seconds
                self._shortfall = needed - free_count()
            return needed

        def look(on: bool) -> None:
            coordinator.get_num_blocks_to_allocate = get_num_blocks_to_allocate if on else original

        # In a step that can miss nothing it would only take time.
        self.looks, self._look = True, look
        look(True)

    # Around a step -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Before vLLM schedules: what has come, what others ask for, and growth ahead of need."""
        memory, called = self.memory, self.watch.called
        self._shortfall, self._refused = 0, False
        memory.pay()
        if memory.pending:
            memory.settle()
        if called:
            self.watch.called = False
            self.came_free()
            self._pressed = True
            memory.hurry()
        idle = not self._scheduler.has_unfinished_requests()
        self._lingered = self._lingered and idle
        if memory.trim_soon or (called and idle):
            self._lingered = not memory.trim() and not memory.pending
        elif not idle:
            memory.give_surplus(self._foresight.wanted_blocks)
        if self._pressed or self._owes():
            memory.show(State.RUNNING)
            self._give()
        self.asleep = False
        # Behind what preempts: whoever is preempted may be taken up again in this very step.
        most = None if idle else self._need.most()
        if idle:
            self._foresight.wishes = False
        elif not (self._pressed and memory.growing):
            # Who owes lets what is under way come first: meanwhile nothing can be given.
            self._foresight.grow(most)
        self._spare_cache()
        looks = most is None or most > memory.free_count
        if looks != self.looks:
            self.looks = looks
            self._look(looks)

    def _spare_cache(self) -> None:
        """While memory is coming, nobody is admitted for whom something cached would have to go.

        Beside requests that run, vLLM leaves its watermark free, and they may evict; a first one
        waits as it does where nothing is cached.
        """
        growing = self.memory.growing
        watermark = int(self._foresight.watermark * self.memory.pool.usable_count)
        if growing:
            watermark = max(watermark, self._pool.cached_count)
        self._manager.watermark_blocks = watermark
        self._pool.spares_cache = growing and not self._scheduler.running

    def _owes(self) -> bool:
        """Whether to look what others may have: what has come free since they called is theirs."""
        now = time.monotonic()
        if now < self._owing_at or not self.memory.owing:
            return False
        self._owing_at = now + _OWING_SECONDS
        return True

    def _give(self) -> None:
        """Give what is idle, then what is demanded of running requests."""
        memory = self.memory
        self._pressed = memory.yield_to_others()
        # What a preemption frees has to go at once, or the same request has it again.
        if not memory.changes.busy and self._preemption.serve():
            memory.publish()
            memory.yield_to_others()
            self._pressed = True

    def end(self, output: Any) -> None:
        """After vLLM has scheduled: wish for what it missed, and send the step's orders with it."""
        memory, scheduler = self.memory, self._scheduler
        regroups = False
        if self._shortfall > 0:
            self._find_hopeless()
            self.hopeless |= self._overdue.find(self._need.heads())
            if time.monotonic() >= self._missed_at:
                desired = max(self._shortfall, self._need.blocks() - memory.free_count)
                self._refused = not memory.grow_for(self._shortfall, desired)
                if self._refused:
                    self._missed_at = time.monotonic() + self._probe_seconds
            regroups = self._refused and self._regroup(output)
        else:
            if not self._foresight.wishes:
                memory.end_wish()
            self._overdue.forget()
            self._probe_seconds = _PROBE_SECONDS
        self.watch.search(memory.wishing)
        message = memory.ranks.message()
        if message is not None:
            output.kvtide = message
        idle = not scheduler.has_unfinished_requests()
        self.asleep = (
            self._shortfall > 0
            and not regroups
            and memory.wishing
            and not memory.pending
            and not scheduler.running
            and output.total_num_scheduled_tokens == 0
        )
        if self.asleep:
            memory.show(State.WAITING)
            self.watch.alarm(min(self._probe_seconds, self._overdue.left_seconds))
            self._probe_seconds = min(2 * self._probe_seconds, _LONGEST_PROBE_SECONDS)
        elif idle:
            memory.show(State.SLEEPING)
            if memory.owes_refunds:
                self.watch.alarm(_OWING_SECONDS)
            elif self._pool.free.count and not memory.pending and not self._lingered:
                self.watch.alarm(_LINGER_SECONDS)
        else:
            memory.show(State.RUNNING)

    def _regroup(self, output: Any) -> bool:
        """Where nothing runs because what there is lies apart: give it back, to have it anew in the
        next step; whether anything goes."""
        if self._scheduler.running or output.total_num_scheduled_tokens:
            return False
        blocks = self._shortfall + self.memory.free_count
        if not fits_regrouped(self.memory, blocks, self._shortfall) or not self.memory.regroup():
            return False
        self._missed_at = 0.0
        return True

    def _find_hopeless(self) -> None:
        """Note the requests at the head of the queue for which the memory can never come."""
        for request in self._need.heads():
            text = why_never(self.memory, self._need.least(request.num_tokens))
            if text is not None:
                self.hopeless[request.request_id] = f"{request.num_tokens} tokens take {text}"

    # Between steps -----------------------------------------------------------------------------

    def wants_step(self) -> bool:
        """Whether a step is wanted though no request may need one."""
        if self.memory.pending:
            self.memory.settle()
            if not self.memory.pending:
                # It ends as every step does: with what it may owe now, and a look at what is free.
                return True
        return self.watch.called or self.memory.pending or self.memory.trim_soon

    def wait_here(self) -> None:
        """Where the engine has no main loop that could sleep: sleep until woken."""
        if self._waits_here and not self.watch.called:
            self._roused.wait(_LONGEST_PROBE_SECONDS)
        self._roused.clear()

    def wake(self) -> None:
        """A request came: look whether it can run. It frees nothing that was refused."""
        self.asleep = False
        self._missed_at = 0.0

    def came_free(self) -> None:
        """Requests ended before their time, or others gave: what was refused may be had now."""
        self.asleep = False
        self._missed_at = 0.0
        self._foresight.hurry()

    def close(self) -> None:
        """End the watch and let go of the ranks."""
        self.watch.close()
        self.memory.close()


def _connect(
    descriptions: tuple[Description, ...], circulation: ElasticBlockPool
) -> GrowingMemory[Any]:
    """Elastic memory over the ranks that introduced themselves, with what they have mapped."""
    assert descriptions
    geometries: list[Geometry] = []
    members, seats = [], {}
    for d in descriptions:
        strips = [Strip(*strip) for strip in d.strips]
        geometry = Geometry.of(d.blocks_total, strips, d.granularity_bytes)
        if geometry not in geometries:
            geometries.append(geometry)
        if d.device_uuid not in seats:
            ledger = Ledger.attach(Path(d.ledger))
            seats[d.device_uuid] = Seat(ledger, ledger.instance(d.instance))
        account = seats[d.device_uuid].ledger.account(d.account)
        shape = geometries.index(geometry)
        members.append(Member(d.rank, shape, d.device_uuid, account, _link(d), d.pid))
    cap_bytes = cap_for(min(d.device_bytes for d in descriptions))
    pool = Pool(geometries, cap_bytes)
    memory = GrowingMemory(seats, Ranks(members), pool, circulation, cap_bytes)
    first = {geometries[m.shape]: d for m, d in zip(members, descriptions, strict=True)}
    memory.adopt(
        [
            [Run(o // g.granularity_bytes, n // g.granularity_bytes) for o, n in first[g].extents]
            for g in geometries
        ]
    )
    return memory


def _link(description: Description) -> Link:
    import os

    if description.pid == os.getpid():
        return DirectLink(endpoint_of(description.account))
    return SocketLink(description.rank, SchedulerSocket(description.socket))
