"""All ranks of one engine as its scheduler sees them: grants for all, orders to all, one outcome.

Every order goes to every rank, and has one outcome when the last rank has answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtide.errors import RankLostError
from kvtide.ledger import Account, Granted, Refusal
from kvtide.ranks.links import Link
from kvtide.ranks.messages import Answer, Grow, Order, Parting, Place, Sample, Shrink, encode

__all__ = ["Member", "Outcome", "Ranks"]

# As long as vLLM itself waits for a step. A rank that has died is noticed at once by other means.
_ANSWER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Member:
    """One rank: its number, which of the engine's geometries it has, its account and link."""

    rank: int
    shape: int
    device_uuid: str
    account: Account
    link: Link
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an order.

    Attributes
    ----------
    orders
        As it was given, one for each shape.
    done
        Every rank that was asked carried it out.
    answers
        By rank, of those that were asked.
    """

    orders: tuple[Order, ...]
    done: bool
    answers: dict[int, Answer]

    @property
    def sequence(self) -> int:
        """The order's number."""
        return self.orders[0].sequence


@dataclass(slots=True)
class _Pending:
    orders: tuple[Order, ...]
    asked: set[int]
    deadline: float
    answers: dict[int, Answer] = field(default_factory=dict)


class Ranks:
    """The members of one engine, in the order of their ranks.

    Parameters
    ----------
    members
        All of them.
    answer_seconds
        How long an order may stay unanswered before the engine is given up.
    clock
        Monotonic seconds.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = tuple(sorted(members, key=lambda m: m.rank))
        # One device's lock at a time, several devices in the order of their UUIDs.
        self._by_device = sorted(self.members, key=lambda m: (m.device_uuid, m.rank))
        self._pending: dict[int, _Pending] = {}
        self._sequence = 0
        self._answer_seconds = answer_seconds
        self._clock = clock
        self.direct = all(m.link.direct for m in self.members)

    @property
    def pending(self) -> bool:
        """Whether an order waits for an answer."""
        return bool(self._pending)

    # Accounts ----------------------------------------------------------------------------------

    def grant(self, bytes_of_shape: Sequence[int]) -> Refusal | None:
        """Have the ledgers grant so many bytes to every rank of each shape: all or none."""
        granted: list[tuple[Account, int]] = []
        for member in self._by_device:
            size_bytes = bytes_of_shape[member.shape]
            answer = member.account.grant(size_bytes) if size_bytes else Granted(0)
            if isinstance(answer, Refusal):
                for account, taken_bytes in granted:
                    account.refund(taken_bytes, wake=False)
                return answer
            granted.append((member.account, size_bytes))
        return None

    def refund(self, bytes_of_rank: Mapping[int, int]) -> None:
        """Give back to the ledgers what ranks were granted and hold no more."""
        for member in self._by_device:
            size_bytes = bytes_of_rank.get(member.rank, 0)
            if size_bytes:
                member.account.refund(size_bytes)

    # Orders ------------------------------------------------------------------------------------

    def grow(self, extents_of_shape: Sequence[tuple[Place, ...]]) -> int:
        """Order all ranks to map; the order's sequence number."""
        sequence = self._next()
        return self._submit(tuple(Grow(sequence, extents) for extents in extents_of_shape))

    def shrink(
        self,
        extents_of_shape: Sequence[tuple[Place, ...]],
        splits_of_shape: Sequence[tuple[Parting, ...]],
    ) -> int:
        """Order all ranks to give back; the order's sequence number."""
        sequence = self._next()
        pairs = zip(extents_of_shape, splits_of_shape, strict=True)
        return self._submit(tuple(Shrink(sequence, extents, splits) for extents, splits in pairs))

    def sample(self, shapes: int) -> int:
        """Order all ranks to measure their device's free memory."""
        sequence = self._next()
        return self._submit((Sample(sequence),) * shapes)

    def undo_growth(self, orders: tuple[Order, ...], mapped: set[int]) -> int:
        """Order the ranks that mapped a growth to give it back; the order's sequence number."""
        sequence = self._next()
        undo = tuple(Shrink(sequence, o.extents) for o in orders if isinstance(o, Grow))
        return self._submit(undo, mapped)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _submit(self, orders: tuple[Order, ...], only: set[int] | None = None) -> int:
        sequence = orders[0].sequence
        asked = [m for m in self.members if only is None or m.rank in only]
        deadline = self._clock() + self._answer_seconds
        self._pending[sequence] = _Pending(orders, {m.rank for m in asked}, deadline)
        for member in asked:
            member.link.submit(orders[member.shape])
        return sequence

    def message(self) -> dict[int, bytes] | None:
        """What the next step must carry, by rank; None when there is nothing."""
        message: dict[int, bytes] = {}
        encoded: dict[tuple[Order, ...], bytes] = {}
        for member in self.members:
            orders = member.link.take_orders()
            if orders:
                if orders not in encoded:
                    encoded[orders] = encode(orders)
                message[member.rank] = encoded[orders]
        return message or None

    # Answers -----------------------------------------------------------------------------------

    def receive(self) -> list[Outcome]:
        """Outcomes of the orders that all ranks have answered by now, in order. Never waits.

        Raises
        ------
        RankLostError
            A rank that must answer has ended, or has not answered for too long.
        """
        if not self._pending:
            return []
        for member in self.members:
            for answer in member.link.receive():
                pending = self._pending.get(answer.sequence)
                # An answer to an order that has ended, or a second one, changes nothing.
                if pending is not None and member.rank in pending.asked:
                    pending.answers.setdefault(member.rank, answer)
        outcomes = []
        for sequence, order in list(self._pending.items()):
            if len(order.answers) == len(order.asked):
                del self._pending[sequence]
                done = all(answer.done for answer in order.answers.values())
                outcomes.append(Outcome(order.orders, done, order.answers))
        if self._pending:
            self._check_alive()
        return outcomes

    def _check_alive(self) -> None:
        oldest = next(iter(self._pending.values()))
        late = self._clock() > oldest.deadline
        for member in self.members:
            waited_for = any(
                member.rank in p.asked and member.rank not in p.answers
                for p in self._pending.values()
            )
            if waited_for and (late or member.link.ended):
                what = (
                    "has ended"
                    if member.link.ended
                    else f"has not answered for {self._answer_seconds:.0f} s"
                )
                raise RankLostError(
                    f"the worker of rank {member.rank} (process {member.pid}) {what}, and the "
                    "engine cannot know what it has mapped: all of this server ends. See the "
                    "worker's log"
                )

    def close(self) -> None:
        """Let go of all ranks."""
        for member in self.members:
            member.link.close()
