"""One rank's memory: carries out the orders that come with a step, and answers them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from kvtide.device.base import Device, Fence
from kvtide.errors import DeviceError
from kvtide.ledger import Account
from kvtide.memory.arena import Arena
from kvtide.memory.carrying import split_by_way_of
from kvtide.memory.extents import Span
from kvtide.observe.tally import Cause, Kind, Tally
from kvtide.observe.timed import TimedDevice
from kvtide.ranks.messages import Answer, Grow, Order, Place, Sample, Shrink

__all__ = ["RankMemory"]

_log = logging.getLogger(__name__)


class RankMemory:
    """An arena on an account, changed by orders at the head of a step, on the main thread.

    What leaves is unmapped only behind a fence that follows the last step that could touch it:
    such an order is answered at a later step, or by `settle`.
    """

    def __init__(self, device: Device, arena_bytes: int, account: Account) -> None:
        self.device = device
        self.account = account
        self._timed = TimedDevice(device)
        self._tally: Tally | None = None
        self.arena = Arena(self._timed, arena_bytes, account)
        self._leaving: deque[tuple[Fence, Shrink]] = deque()
        # Stuck by the rank's own changes, of which its scheduler does not know yet.
        self._untold_bytes = 0

    def watch(self, tally: Tally) -> None:
        """Count into this tally from now on; it is closed with this."""
        self._tally = tally

    @property
    def leaving(self) -> bool:
        """Whether something waits for the device before it can be unmapped."""
        return bool(self._leaving)

    @property
    def places(self) -> tuple[Place, ...]:
        """What is mapped, as (offset, size)."""
        return tuple((span.offset_bytes, span.size_bytes) for span in self.arena.extents)

    def carry_out(self, orders: Sequence[Order]) -> list[Answer]:
        """Carry out a step's orders; answers of these and of earlier ones that could be ended.

        Waits for queued work of the device only where an extent is split.

        Raises
        ------
        DeviceError
            What a split had to keep was lost.
        """
        answers = self._end_passed() if self._leaving else []
        for order in orders:
            if isinstance(order, Grow):
                answers.append(self._grow(order))
            elif isinstance(order, Shrink):
                answers += self._take_back(order)
            else:
                assert isinstance(order, Sample)
                self._sample()
                answers.append(Answer(order.sequence, True))
        return answers

    def _take_back(self, order: Shrink) -> list[Answer]:
        fence = self.device.fence()
        if order.splits:
            # What stays is in use: nothing may be queued that touches it while it is moved.
            fence.wait()
            return [*self.settle(), self._shrink(order)]
        if not self._leaving and fence.passed():
            return [self._shrink(order)]
        self._leaving.append((fence, order))
        return []

    def settle(self) -> list[Answer]:
        """Wait for the device and end all that is pending: for a step that has nothing to run."""
        answers = []
        while self._leaving:
            fence, order = self._leaving.popleft()
            fence.wait()
            answers.append(self._shrink(order))
        return answers

    def _end_passed(self) -> list[Answer]:
        answers = []
        while self._leaving and self._leaving[0][0].passed():
            answers.append(self._shrink(self._leaving.popleft()[1]))
        return answers

    def _grow(self, order: Grow) -> Answer:
        stuck_before = self.arena.quarantined_bytes
        if not self._is_granted(order, stuck_before):
            _log.warning("an order to map what was never granted is not carried out: %s", order)
            return Answer(order.sequence, False)
        try:
            done = self.arena.grow(order.extents)
        except DeviceError as error:
            _log.warning("the device did not map %d extents: %s", len(order.extents), error)
            done = False
        if not done:
            # A grant that the device does not honour: somebody else has the memory.
            self._sample()
        return self._answer(order.sequence, stuck_before, done=done)

    def _is_granted(self, order: Grow, stuck_bytes: int) -> bool:
        """Nothing is taken by a peer's word alone: the ledger has to know of it."""
        wanted_bytes = sum([size for _, size in order.extents])
        return self.arena.mapped_bytes + stuck_bytes + wanted_bytes <= self.account.charge_bytes

    def _sample(self) -> None:
        """Measure; what cannot be measured now is measured when somebody asks again."""
        try:
            self.account.sample()
        except DeviceError as error:
            _log.warning("the free memory of the device is unknown: %s", error)

    def _shrink(self, order: Shrink) -> Answer:
        stuck_before = self.arena.quarantined_bytes
        self.arena.shrink(order.extents)
        kept = list(order.splits)
        # What goes carries the splits after it: where something has not gone, none is made.
        while kept and self.arena.quarantined_bytes == stuck_before and self._split(*kept[0]):
            del kept[0]
        whole = tuple(place[0] for place, _, _ in kept)
        return self._answer(order.sequence, stuck_before, kept=whole)

    def _split(self, place: Place, keep: tuple[Place, ...], staging: tuple[int, ...]) -> bool:
        span, parts = Span(*place), [Span(*part) for part in keep]
        if staging:
            return split_by_way_of(self.arena, span, parts, staging)
        return self.arena.split(span, parts)

    def _answer(
        self, sequence: int, stuck_before: int, *, done: bool = True, kept: tuple[int, ...] = ()
    ) -> Answer:
        self._timed.tell(self._tally)
        stuck_bytes = self.arena.quarantined_bytes - stuck_before
        if stuck_bytes and self._tally is not None:
            self._tally.note(Kind.QUARANTINE, Cause.DEVICE, stuck_bytes)
        if sequence == 0:
            # Ordered by the rank itself: the scheduler sees no answer to it.
            self._untold_bytes += stuck_bytes
            return Answer(0, done, kept, stuck_bytes)
        before_bytes, self._untold_bytes = self._untold_bytes, 0
        blocked = self._blocked() if stuck_bytes or before_bytes else ()
        return Answer(sequence, done, kept, stuck_bytes, blocked, before_bytes)

    def _blocked(self) -> tuple[Place, ...]:
        base, end = self.arena.address, self.arena.address + self.arena.size_bytes
        return tuple(
            (address - base, stuck.handle.size_bytes)
            for stuck in self.arena.quarantined
            for address in stuck.addresses
            if base <= address < end
        )

    def close(self) -> None:
        """Give everything back."""
        self.settle()
        self.arena.close()
        if self._tally is not None:
            self._tally.close()
