"""The tide of one SGLang scheduler: around each round, what memory comes, goes or is waited for."""

from __future__ import annotations

import math
import time
from typing import Any

from kvtide.engines.sglang.agreement import Agreement
from kvtide.engines.sglang.assembly import Rank, parts_of, slots_of
from kvtide.engines.sglang.devices import order_with
from kvtide.engines.sglang.fitting import most_blocks
from kvtide.engines.sglang.memory import SlotMemory
from kvtide.engines.sglang.need import Load, Need, read_load, states_per_request
from kvtide.engines.sglang.overdue import Overdue, end_request
from kvtide.engines.sglang.own import record_own
from kvtide.engines.sglang.retraction import Retraction, let_go_of_chunk
from kvtide.engines.sglang.sleeper import Sleeper
from kvtide.ledger import State
from kvtide.ranks.seat import Wish
from kvtide.settings import Settings

__all__ = ["Tide"]

# How long free memory is kept by an engine that has nothing to do.
_LINGER_SECONDS = 0.5
# While memory is waited for: the first and the longest pause between two looks without a wake-up.
_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 0.25, 4.0
# While an idle engine owes refunds for which the ledger was too busy.
_OWING_SECONDS = 0.05


class Tide:
    """Growth before a batch is chosen, a wish for what is missed, and sleep while nothing can run.

    All ranks of a server do the same in every round: what differs between them (their ledgers,
    their clocks) is agreed on first.

    Parameters
    ----------
    scheduler
        SGLang's, just made; its allocators are adopted.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._agreement = Agreement(scheduler.attn_tp_cpu_group)
        self._states = states_per_request(scheduler)
        parts = parts_of(scheduler, states=self._states > 0)
        mine = Rank.of(parts["full"])
        ranks: list[Rank] = self._agreement.gather(mine)
        on_device = [r.uuid for r in ranks]
        self._sharers = on_device.count(mine.uuid)
        # One rank of those on a device speaks for all of them there.
        self._speaks = on_device.index(mine.uuid) == self._agreement.rank
        # What is freed while a batch runs is unmapped behind it; what comes is zeroed before it.
        stream = scheduler.forward_stream if scheduler.enable_overlap else scheduler.schedule_stream
        order_with(parts["full"].device, stream)
        self.memories = {
            kind: SlotMemory(part, slots_of(scheduler, kind), self._sharers, self._agreement.size)
            for kind, part in parts.items()
        }
        self.retraction = Retraction(scheduler, self.memories, self._agreement)
        self._uuid = mine.uuid
        self._wish = Wish({mine.uuid: parts["full"].seat})
        self._wished_at = 0.0
        self._overdue = Overdue(parts["full"].seat, Settings.from_environ().wait_deadline)
        self._sleeper = Sleeper(scheduler, ranks) if self._agreement.rank == 0 else None
        self._running = 0
        # Rounds in a row in which nothing could run.
        self._stuck = 0
        self._pressed = False
        self._trim_soon = False
        self._idle_since: float | None = None
        self._ahead_at = 0.0
        self._probe_seconds = _PROBE_SECONDS
        if self._speaks:
            record_own(scheduler, parts.values())
        # Slots of full attention that could be had beyond those that are mapped.
        self.growable = 0
        self._show(State.SLEEPING)

    # A round -----------------------------------------------------------------------------------

    def begin(self, running_batch: Any) -> None:
        """Before SGLang chooses a batch: what others ask for, and growth for what is needed."""
        memories, agree = self.memories, self._agreement
        for memory in memories.values():
            memory.pay()
            if memory.pending:
                memory.settle()
                memory.count_hidden()
        load = read_load(self._scheduler, running_batch)
        need = load.need(self._scheduler.page_size, self._window, self._states)
        self._keep_floor(need, load)
        if len(load.running) < self._running:
            self._pressed = True
            for memory in memories.values():
                memory.sharing.forget_hoard()
        self._running = len(load.running)
        if self._running:
            self._stuck = 0
        missing = self._missing(need)
        idle = not (load.running or load.chunk or self._scheduler.waiting_queue)
        now = time.monotonic()
        woken = self._sleeper is not None and self._sleeper.called()
        called, trim, ahead, owes, due = agree.largest(
            [
                woken,
                self._trim_soon or (idle and self._lingered(now)),
                any(missing.values()) and now >= self._ahead_at,
                *self.retraction.look(called=woken),
            ]
        )
        changed = False
        self._pressed |= bool(owes)
        self._owe_of_running(due, any_runs=bool(load.running or load.chunk))
        if called:
            self._ahead_at, self._pressed = 0.0, True
            for memory in memories.values():
                memory.hurry()
        if trim or (called and idle):
            self._trim_soon, self._idle_since = False, math.inf
            for memory in memories.values():
                changed |= memory.give_free()
        if self._pressed:
            self._pressed = self._yield()
            changed = True
        if ahead or called:
            missing = dict(
                zip(memories, agree.largest(list(self._missing(need).values())), strict=True)
            )
            grown = [self._grow(kind, blocks) for kind, blocks in missing.items() if blocks]
            if any(grown):
                running_batch.batch_is_full = False
            if not all(grown):
                self._ahead_at = now + _PROBE_SECONDS
            changed |= bool(grown)
        if changed or agree.size > 1:
            self._agree_on_counts()
        self._wish_for(need)
        self._count_growable(bool(self._scheduler.waiting_queue) or load.chunk > 0)
        if not idle:
            self._idle_since = None
            self._show(State.RUNNING)

    def _owe_of_running(self, granules: int, *, any_runs: bool) -> None:
        self.retraction.due = granules
        if granules and not any_runs:
            self.retraction.nothing_more()

    @property
    def _window(self) -> int | None:
        s = self._scheduler
        return int(s.sliding_window_size) if s.is_hybrid_swa else None

    def _lingered(self, now: float) -> bool:
        if self._idle_since is None:
            self._idle_since = now
            if self._sleeper is not None:
                self._sleeper.watch.alarm(_LINGER_SECONDS)
        return now - self._idle_since >= _LINGER_SECONDS

    def _keep_floor(self, need: Need, load: Load) -> None:
        """What running requests must have stays: their states, and the rest of a prompt."""
        for kind, memory in self.memories.items():
            rest = min(load.chunk, load.step) if kind == "swa" else load.chunk
            pages = -(-rest // int(self._scheduler.page_size)) + 1 if rest else 0
            floor = memory.used_count + pages if pages else 0
            memory.sharing.floor = need.states if kind == "mamba" else floor

    def _missing(self, need: Need) -> dict[str, int]:
        """Blocks of each kind that are needed, not free, and might be had."""
        free = {"full": need.full, "swa": need.window, "mamba": need.fresh_states}
        missing = {}
        for kind, memory in self.memories.items():
            lacking = free[kind] - memory.free
            if kind == "mamba":
                lacking = max(lacking, self._missing_states(need))
            missing[kind] = min(max(0, lacking), memory.hidden)
        return missing

    def _missing_states(self, need: Need) -> int:
        """States without which not all can run, whatever the cache gives up."""
        memory = self.memories["mamba"]
        return min(need.states - (memory.pool.usable_count - 1), memory.hidden)

    def _yield(self) -> bool:
        """Give what others wish for; whether to look again."""
        for memory in self.memories.values():
            memory.publish()
        if not any(self._agreement.largest([m.sharing.demanded() for m in self.memories.values()])):
            return any(self._agreement.largest([m.pending for m in self.memories.values()]))
        going = False
        for memory in self.memories.values():
            memory.publish()
            (granules,) = self._agreement.largest([memory.sharing.demanded()])
            if granules:
                going |= memory.give(granules)
        return going

    def _grow(self, kind: str, blocks: int) -> bool:
        """Have so many blocks come in all ranks, or in none."""
        memory = self.memories[kind]
        for wanted in memory.attempts(blocks):
            came = memory.try_growth(wanted)
            (all_could,) = self._agreement.smallest([came is not None])
            if all_could:
                return True
            if came is not None:
                memory.undo_growth(came)
        return False

    def _agree_on_counts(self) -> None:
        """Nobody counts with blocks that not all ranks have."""
        if self._agreement.size == 1:
            return
        free = [memory.free for memory in self.memories.values()]
        agreed = self._agreement.smallest(free)
        for memory, mine, smallest in zip(self.memories.values(), free, agreed, strict=True):
            memory.slots.allocator.withheld = mine - smallest

    def _wish_for(self, need: Need) -> None:
        """Wish for what is needed beyond what this engine has idle itself, as long as it is."""
        if not self._speaks:
            return
        size_bytes, all_missing = 0, self._missing(need)
        for kind, memory in self.memories.items():
            missing = all_missing[kind]
            if kind == "mamba":
                missing = self._missing_states(need)
            elif not self._stuck:
                # Where nothing can run, the cache is of no use: it may be what would be matched.
                missing -= memory.circulation.cached_count
            if missing > 0:
                size_bytes += memory.bytes_for(missing) * self._sharers
        if size_bytes:
            if not self._wish.made or time.monotonic() >= self._wished_at + _PROBE_SECONDS:
                self._wished_at = time.monotonic()
                self._wish.renew({self._uuid: size_bytes})
        else:
            self._wish.end()
            self._probe_seconds = _PROBE_SECONDS
        if self._sleeper is not None:
            self._sleeper.watch.search(self._wish.made)

    def _count_growable(self, wanted: bool) -> None:
        """How many slots of full attention a request that is admitted may count on for later."""
        memory = self.memories["full"]
        growable = 0
        if wanted and memory.hidden:
            block_bytes = memory.part.geometry.block_bytes * self._sharers
            instance = memory.part.seat.instance
            obtainable_bytes = instance.obtainable_bytes(memory.hidden * block_bytes)
            growable = min(memory.hidden, obtainable_bytes // block_bytes)
        if self._agreement.size > 1:
            (growable,) = self._agreement.smallest([growable])
        self.growable = growable * self._scheduler.page_size

    # Without a batch ---------------------------------------------------------------------------

    def idle(self) -> None:
        """No batch could be chosen: there is nothing to do, or no memory to do it in."""
        if self._scheduler.is_fully_idle():
            self._stuck = 0
            self._show(State.SLEEPING)
            owes = any(memory.owes_refunds for memory in self.memories.values())
            if owes and self._sleeper is not None:
                self._sleeper.watch.alarm(_OWING_SECONDS)
            return
        self._stuck += 1
        # SGLang's mark stays where nothing runs: what waits is looked at whenever it is woken.
        self._scheduler.running_batch.batch_is_full = False
        if self._stuck > 1 and self._scheduler.chunked_req is not None:
            # Two that each have taken up a part of a prompt would wait for each other.
            let_go_of_chunk(self._scheduler)
            self._pressed = True
            return
        if self._ends_head() or not self._wish.made or self._sleeper is None:
            return
        self._show(State.WAITING)
        self._sleeper.sleep(self._probe_seconds)
        self._ahead_at = 0.0
        self._probe_seconds = min(2 * self._probe_seconds, _LONGEST_PROBE_SECONDS)

    def _ends_head(self) -> bool:
        """Whether the first in the queue waited in vain and was ended."""
        queue = self._scheduler.waiting_queue
        if not queue:
            return False
        head, most = queue[0], self.most_tokens()
        (late,) = self._agreement.largest([self._overdue.is_late(head)])
        tokens = len(head.origin_input_ids) + len(head.output_ids)
        if tokens > most:
            end_request(self._scheduler, head, self._overdue.why_never(tokens, most))
        elif late:
            end_request(self._scheduler, head, self._overdue.why_late(tokens))
        return tokens > most or bool(late)

    def flushed(self) -> None:
        """The cache was flushed: its memory goes at once."""
        for memory in self.memories.values():
            memory.count_hidden()
            memory.give_free()
            memory.part.endpoint.step(None, runs=False)
            memory.settle()
            memory.count_hidden()
        self._agree_on_counts()

    def most_tokens(self) -> int:
        """The longest request that any state of the ledger could hold; all ranks ask, or none."""
        memory = self.memories["full"]
        mine = most_blocks(memory.part.geometry, memory.part.seat, self._sharers)
        (blocks,) = self._agreement.smallest([mine])
        return (blocks - 1) * int(self._scheduler.page_size)

    def states_room(self) -> int | None:
        """How many requests the states that are mapped can serve; None without states."""
        if "mamba" not in self.memories:
            return None
        return (self.memories["mamba"].pool.usable_count - 1) // self._states

    def _show(self, state: State) -> None:
        for memory in self.memories.values():
            memory.show(state)
