"""A rank's side of the engine: its memory, its socket, and what it tells of itself."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.errors import NeverFitsError
from kvtide.ledger import Refusal
from kvtide.pool import Geometry
from kvtide.ranks.memory import RankMemory
from kvtide.ranks.messages import (
    Answer,
    Answers,
    Description,
    Grow,
    Order,
    Place,
    Shrink,
    decode_orders,
    encode,
)
from kvtide.ranks.sockets import RankSocket
from kvtide.units import format_size

if TYPE_CHECKING:
    from kvtide.ranks.elastic import Seat

__all__ = ["Endpoint", "endpoint_of"]

# Ranks that live in this process, for a scheduler that does too.
_here: dict[str, Endpoint] = {}


def endpoint_of(account_key: str) -> Endpoint:
    """The endpoint of a rank in this process, by its account."""
    return _here[account_key]


class Endpoint:
    """One rank: carries out the orders that come with its steps, and answers by socket.

    Parameters
    ----------
    memory
        Its arena and account.
    seat
        Its engine's place on the device.
    geometry, layout
        Of its blocks.
    rank
        Its number.
    directory
        Where its socket lies until the scheduler has connected.
    """

    def __init__(
        self,
        memory: RankMemory,
        seat: Seat,
        geometry: Geometry,
        layout: str,
        rank: int,
        directory: Path,
    ) -> None:
        self.memory = memory
        self._seat = seat
        self._geometry = geometry
        self._layout = layout
        self._rank = rank
        name = f"{seat.ledger.path.stem}.{memory.account.key.replace(':', '.')}.rank"
        self._socket = RankSocket(directory / name)
        self._answers: list[Answer] = []
        self._direct = False
        self._named: list[Place] = []
        _here[memory.account.key] = self

    def back_null_block(self) -> None:
        """Map what block 0 touches: padding and dummy runs write there, at all times.

        Raises
        ------
        NeverFitsError
            Not even that can be had.
        """
        self._back({0}, "at all times, one smallest extent or two for each part of its blocks")

    def back_named(self, blocks: Iterable[int]) -> None:
        """Map what these blocks touch until `forget_named`: a warm-up names them.

        Raises
        ------
        NeverFitsError
            It cannot be had.
        """
        self._named += self._back(blocks, "while the engine warms up")

    def forget_named(self) -> None:
        """Give back what `back_named` mapped; no queued work may touch it any more."""
        places, self._named = tuple(self._named), []
        if places:
            self.memory.carry_out((Shrink(0, places),))
            self.memory.settle()
            self.memory.account.refund(sum(size for _, size in places))

    def _back(self, blocks: Iterable[int], why: str) -> list[Place]:
        """Map the granules under blocks that are not mapped; what was mapped now."""
        size = self._geometry.granularity_bytes
        mapped = {
            granule
            for offset, length in self.memory.places
            for granule in range(offset // size, (offset + length) // size)
        }
        granules = {
            granule
            for block in blocks
            for first, end in self._geometry.granule_runs(block, block + 1)
            for granule in range(first, end)
        }
        places = [(granule * size, size) for granule in sorted(granules - mapped)]
        if places:
            self._take(tuple(places), why)
        return places

    def _take(self, places: tuple[Place, ...], why: str) -> None:
        needed_bytes = sum(size for _, size in places)
        answer = self.memory.account.grant(needed_bytes)
        if isinstance(answer, Refusal):
            snapshot = self._seat.ledger.snapshot()
            holders = ", ".join(
                f"{i.name} {format_size(i.charged_bytes)}" for i in snapshot.instances
            )
            raise NeverFitsError(
                f"the KV cache needs {format_size(needed_bytes)} {why}, and "
                f"{format_size(answer.available_bytes)} may be had ({answer.reason}): held are "
                f"{holders}. Give the device a budget, or this instance a limit, that leaves it "
                f"at least {format_size(needed_bytes)}"
            )
        if not self.memory.carry_out((Grow(0, places),))[0].done:
            self.memory.account.refund(needed_bytes)
            raise NeverFitsError(
                f"the device has no {format_size(needed_bytes)} left, though they were granted: "
                "another process took them; see `kvtide status` and what else runs there"
            )

    def answer_directly(self) -> None:
        """The scheduler is in this process: it takes the answers itself."""
        self._direct = True
        self._socket.close()

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Carry out orders outside of a step's message, for a scheduler in this process."""
        self._answers += self.memory.carry_out(orders)

    def take_answers(self) -> list[Answer]:
        """Answers since the last call, also of what could be ended since."""
        if self.memory.leaving:
            self._answers += self.memory.carry_out(())
        answers, self._answers = self._answers, []
        return answers

    def step(self, message: dict[int, bytes] | None, *, runs: bool) -> None:
        """The head of a step: carry out its orders and answer. Never waits while `runs`."""
        if message is not None and self._rank in message:
            self._answers += self.memory.carry_out(decode_orders(message[self._rank]))
        elif self.memory.leaving:
            self._answers += self.memory.carry_out(())
        if not runs:
            self._answers += self.memory.settle()
        if (
            self._answers
            and not self._direct
            and self._socket.send(encode(Answers(self._rank, tuple(self._answers))))
        ):
            self._answers = []

    def describe(self) -> bytes:
        """What the scheduler must know, encoded."""
        return encode(
            Description(
                rank=self._rank,
                pid=os.getpid(),
                device_uuid=self.memory.device.info.uuid,
                device_bytes=self.memory.device.info.total_bytes,
                ledger=str(self._seat.ledger.path),
                instance=self._seat.instance.key,
                account=self.memory.account.key,
                blocks_total=self._geometry.blocks_total,
                strips=self._geometry.strips,
                granularity_bytes=self._geometry.granularity_bytes,
                extents=self.memory.places,
                socket=str(self._socket.path),
                layout=self._layout,
            )
        )

    def close(self) -> None:
        """Give everything back."""
        del _here[self.memory.account.key]
        self._socket.close()
        self.memory.close()
        self.memory.account.close()
