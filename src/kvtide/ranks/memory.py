"""One rank's memory: carries out the orders that come with a step, and answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtide.device.base import Device, Fence
from kvtide.ledger import Account
from kvtide.memory.arena import Arena
from kvtide.memory.extents import Span
from kvtide.ranks.messages import Answer, Grow, Order, Place, Sample, Shrink

__all__ = ["RankMemory"]


class RankMemory:
    """An arena on an account, changed by orders at the head of a step, on the main thread.

    What leaves is unmapped only behind a fence that follows the last step that could touch it:
    such an order is answered at a later step, or by `settle`.
    """

    def __init__(self, device: Device, arena_bytes: int, account: Account) -> None:
        self.device = device
        self.account = account
        self.arena = Arena(device, arena_bytes, account)
        self._leaving: deque[tuple[Fence, Shrink]] = deque()

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

        Never waits for queued work of the device.
        """
        answers = self._end_passed() if self._leaving else []
        for order in orders:
            if isinstance(order, Grow):
                answers.append(self._grow(order))
            elif isinstance(order, Shrink):
                fence = self.device.fence()
                if not self._leaving and fence.passed():
                    answers.append(self._shrink(order))
                else:
                    self._leaving.append((fence, order))
            else:
                assert isinstance(order, Sample)
                self.account.sample()
                answers.append(Answer(order.sequence, True))
        return answers

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
        done = self.arena.grow([Span(*place) for place in order.extents])
        if not done:
            # A grant that the device does not honour: somebody else has the memory.
            self.account.sample()
        return Answer(order.sequence, done)

    def _shrink(self, order: Shrink) -> Answer:
        stuck_before = self.arena.quarantined_bytes
        self.arena.shrink([Span(*place) for place in order.extents])
        kept = tuple(
            place[0]
            for place, keep in order.splits
            if not self.arena.split(Span(*place), [Span(*k) for k in keep])
        )
        stuck_bytes = self.arena.quarantined_bytes - stuck_before
        return Answer(
            order.sequence, True, kept, stuck_bytes, self._blocked() if stuck_bytes else ()
        )

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
