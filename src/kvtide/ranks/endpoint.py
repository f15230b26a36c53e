"""A rank's side of the engine: its memory, its socket, and what it tells of itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtide.errors import NeverFitsError
from kvtide.ledger import Refusal, State
from kvtide.ledger.explaining import explain
from kvtide.observe.logs import log_event
from kvtide.observe.tally import Cause, Kind, Owner, Tally, Verb
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
    from kvtide.ranks.seat import Seat

__all__ = ["Endpoint", "endpoint_of"]

_log = logging.getLogger(__name__)

# Between two looks without a wake-up, while the start waits for memory.
_PROBE_SECONDS = 0.25

_ANSWERS_AT_ONCE = 64

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
    wait_seconds
        How long the start waits for memory that others hold; None: for ever.
    """

    def __init__(
        self,
        memory: RankMemory,
        seat: Seat,
        geometry: Geometry,
        layout: str,
        rank: int,
        wait_seconds: float | None,
    ) -> None:
        self.memory = memory
        self._tally = Tally(seat.ledger.path, Owner.of_key("rank", memory.account.key), layout)
        memory.watch(self._tally)
        self.seat = seat
        self._geometry = geometry
        self._layout = layout
        self._rank = rank
        self._wait_seconds = wait_seconds
        self._socket = RankSocket()
        self._answers: list[Answer] = []
        self._direct = False
        self._named: list[Place] = []
        self._last_sequence = 0
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
        """Give back what `back_named` mapped; no queued work may touch it any more.

        What the device does not take back stays charged.
        """
        places, self._named = tuple(self._named), []
        if places:
            gone = [*self.memory.carry_out((Shrink(0, places),)), *self.memory.settle()]
            stuck_bytes = sum(answer.stuck_bytes for answer in gone)
            self.memory.account.refund(sum(size for _, size in places) - stuck_bytes)

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
        """Have these places granted and mapped, and wait for others to give where they must."""
        needed_bytes = sum(size for _, size in places)
        refusal = self._try(places, needed_bytes)
        if refusal is None:
            return
        if refusal.reason == "limit" or needed_bytes > self.seat.ledger.spec.ceiling_bytes:
            raise NeverFitsError(self._short_of(needed_bytes, why, refusal))
        _log.warning("kvtide: waiting: %s", self._short_of(needed_bytes, why, refusal))
        instance, ledger = self.seat.instance, self.seat.ledger
        started = time.monotonic()
        until_ns = 0
        if self._wait_seconds is not None:
            until_ns = time.monotonic_ns() + int(self._wait_seconds * 1e9)
        waker = instance.waker()
        self._note(Kind.WAIT, needed_bytes)
        instance.set_state(State.WAITING)
        try:
            while refusal is not None:
                waited = time.monotonic() - started
                if self._wait_seconds is not None and waited > self._wait_seconds:
                    raise NeverFitsError(
                        f"{self._short_of(needed_bytes, why, refusal)} (waited for "
                        f"{waited:.0f} s, KVTIDE_WAIT_DEADLINE)"
                    )
                instance.wish(needed_bytes, until_ns=until_ns)
                waker.wait(_PROBE_SECONDS)
                ledger.retire_dead()
                self.memory.account.sample()
                refusal = self._try(places, needed_bytes)
        finally:
            instance.wish(0)
            waker.close()
        waited_ns = int((time.monotonic() - started) * 1e9)
        self._tally.time(Verb.WAIT, waited_ns)
        self._note(Kind.RESUME, 0, waited_ns)
        instance.set_state(State.STARTING)

    def _note(self, kind: int, size_bytes: int, detail: int = 0) -> None:
        self._tally.note(kind, Cause.START, size_bytes, detail)
        name, uuid = self.seat.instance.name, self.seat.ledger.spec.uuid
        log_event(name, uuid, kind, Cause.START, size_bytes, detail)

    def _try(self, places: tuple[Place, ...], needed_bytes: int) -> Refusal | None:
        answer = self.memory.account.grant(needed_bytes)
        if isinstance(answer, Refusal):
            return answer
        (grown,) = self.memory.carry_out((Grow(0, places),))
        if grown.done:
            return None
        # Somebody outside the ledger has it.
        self.memory.account.refund(needed_bytes - grown.stuck_bytes)
        return Refusal("budget", needed_bytes, 0, sample_is_stale=False)

    def _short_of(self, needed_bytes: int, why: str, refusal: Refusal) -> str:
        snapshot, name = self.seat.ledger.snapshot(), self.seat.instance.name
        return (
            f"the KV cache needs {format_size(needed_bytes)} {why}, and "
            f"{format_size(refusal.available_bytes)} may be had ({refusal.reason}): "
            f"{explain(snapshot, name, needed_bytes)}"
        )

    def answer_directly(self) -> None:
        """The scheduler is in this process: it takes the answers itself."""
        self._direct = True
        self._socket.close()

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Carry out orders outside of a step's message, for a scheduler in this process."""
        fresh = [order for order in orders if order.sequence > self._last_sequence]
        if fresh:
            # One that comes again is not carried out again.
            self._last_sequence = fresh[-1].sequence
        if fresh or self.memory.leaving:
            self._answers += self.memory.carry_out(fresh)

    def take_answers(self) -> list[Answer]:
        """Answers since the last call, also of what could be ended since."""
        if self.memory.leaving:
            self.carry_out(())
        answers, self._answers = self._answers, []
        return answers

    def step(self, message: dict[int, bytes] | None, *, runs: bool) -> None:
        """The head of a step: carry out its orders and answer. Never waits while `runs`."""
        given = None if message is None else message.get(self._rank)
        self.carry_out(() if given is None else decode_orders(given))
        if not runs:
            self._answers += self.memory.settle()
        # In parts, none larger than a message can be.
        while self._answers and not self._direct:
            part = tuple(self._answers[:_ANSWERS_AT_ONCE])
            if not self._socket.send(encode(Answers(self._rank, part))):
                return
            del self._answers[: len(part)]

    def describe(self) -> bytes:
        """What the scheduler must know, encoded."""
        return encode(
            Description(
                rank=self._rank,
                pid=os.getpid(),
                device_uuid=self.memory.device.info.uuid,
                device_bytes=self.memory.device.info.total_bytes,
                ledger=str(self.seat.ledger.path),
                instance=self.seat.instance.key,
                account=self.memory.account.key,
                blocks_total=self._geometry.blocks_total,
                strips=self._geometry.strips,
                granularity_bytes=self._geometry.granularity_bytes,
                extents=self.memory.places,
                socket=self._socket.address,
                layout=self._layout,
            )
        )

    def close(self) -> None:
        """Give everything back."""
        del _here[self.memory.account.key]
        self._socket.close()
        self.memory.close()
        self.memory.account.close()
