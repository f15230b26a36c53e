"""Elastic memory that its scheduler has grow for all ranks: ahead of need, and for what was missed.

What cannot be had is wished for, so that others give what they can spare.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvtide.ledger import Refusal
from kvtide.observe.tally import Cause, Kind
from kvtide.pool import Block, Growth, Pool
from kvtide.ranks.changes import Circulation
from kvtide.ranks.elastic import ElasticMemory
from kvtide.ranks.journal import refusal_cause
from kvtide.ranks.ranks import Ranks
from kvtide.ranks.seat import Seat, Wish

__all__ = ["GrowingMemory"]

B = TypeVar("B", bound=Block)

# Every block there may ever be is backed, or what is left cannot be.
_NOTHING_LEFT: Final = Refusal("budget", 0, 0, sample_is_stale=False)
_SPARE_SHARE: Final = 8


class GrowingMemory(ElasticMemory[B]):
    """One order a growth for all ranks, whether they are here or in processes of their own.

    Attributes
    ----------
    refusals
        Growths for what the engine missed that could not be had.
    """

    def __init__(
        self,
        seats: dict[str, Seat],
        ranks: Ranks,
        pool: Pool,
        circulation: Circulation[B],
        extent_cap_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As `ElasticMemory`."""
        super().__init__(seats, ranks, pool, circulation, extent_cap_bytes, clock=clock)
        self._wish = Wish(seats)
        self.changes.came = self._came
        self.refusals = 0
        # Bytes that a block takes of each device.
        self._of_block = dict.fromkeys(seats, 0)
        for member in ranks.members:
            self._of_block[member.device_uuid] += self._block_bytes[member.shape]

    @property
    def wishing(self) -> bool:
        """Whether a growth was refused that nothing but others' memory could serve."""
        return self._wish.made

    def grow(self, blocks: int) -> bool:
        """Have at least so many more blocks come, and some ahead; False when it was refused."""
        refusal = self._try_ahead(blocks)
        if refusal is not None and refusal.sample_is_stale and not self.ranks.pending:
            # Others' memory is not asked for before it is known that there is no other.
            self.ranks.sample(len(self.pool.shapes))
            if self.ranks.direct:
                self.settle()
                refusal = self._try_ahead(blocks)
        return refusal is None

    def _try_ahead(self, blocks: int) -> Refusal | None:
        """Grow ahead by what that takes, or by these blocks alone; the last refusal."""
        refusal = _NOTHING_LEFT
        for wanted in (max(blocks, self.ahead_blocks), blocks):
            growths = self.pool.plan_growth(wanted)
            if growths is not None:
                refused = self._grow(growths, Cause.AHEAD)
                if refused is None:
                    return None
                refusal = refused
            if wanted == blocks:
                break
        return refusal

    def grow_for(self, blocks: int, desired: int) -> bool:
        """Have `desired` more blocks come, or at least the `blocks` without which nothing goes on.

        If even these are refused, a wish for the desired ones is registered; not so where no more
        can ever come.

        Returns
        -------
        bool
            Whether some are coming.
        """
        if self.growing:
            return True
        wish = self.pool.plan_growth(max(blocks, desired))
        if wish is None:
            # Every block there may ever be is backed: the engine has to make do with them.
            self.end_wish()
            return False
        refusal, least = self._grow(wish, Cause.NEED), None
        if refusal is not None and desired > blocks:
            least = self.pool.plan_growth(blocks)
            # None where all that is left is stuck in a device, or being undone.
            if least is not None:
                refusal = self._grow(least, Cause.NEED)
        if refusal is None:
            return True
        self.refusals += 1
        self.journal.note(
            Kind.MISS, refusal_cause(refusal), [blocks * b for b in self._block_bytes]
        )
        self._wish_for(wish, least or wish)
        if refusal.sample_is_stale and not self.ranks.pending:
            self.ranks.sample(len(self.pool.shapes))
        return False

    def wish_ahead(self, blocks: int, least_blocks: int) -> None:
        """Ask others for what they can spare before it is missed: these blocks, and some ahead.

        `least_blocks` are those without which the next step has to do with less; with 0 the wish
        holds nobody up.
        """
        wish = self.bytes_to_grow(max(blocks, self.ahead_blocks))
        least = dict.fromkeys(self.seats, 0)
        if least_blocks > 0:
            least = self.bytes_to_grow(min(blocks, least_blocks))
        if wish and least:
            self._wish.make(wish, least)

    def grow_spare(self, blocks: int, spare: int) -> None:
        """Have some come that nobody needs yet: up to so many, of which `spare` are there, and at
        most an eighth of what could be had. For as little as is grown ahead anyway it is not done.
        """
        each = self._of_block
        for uuid, seat in self.seats.items():
            room = seat.instance.obtainable_bytes(blocks * each[uuid]) // each[uuid]
            blocks = min(blocks, (room + spare) // _SPARE_SHARE)
        if blocks - spare >= self.ahead_blocks:
            growths = self.pool.plan_growth(blocks - spare)
            if growths is not None:
                self._grow(growths, Cause.AHEAD)

    def bytes_to_grow(self, blocks: int) -> dict[str, int]:
        """What so many more blocks would take of each device; nothing where no more can come."""
        growths = self.pool.plan_growth(blocks)
        return {} if growths is None else self._of_devices(growths)

    def _grow(self, growths: list[Growth], cause: int) -> Refusal | None:
        if not self._backoff.ready(self._clock()):
            return Refusal("budget", asked_bytes=0, available_bytes=0, sample_is_stale=False)
        bytes_of_shape = [g.granules * self._granule for g in growths]
        refusal = self.ranks.grant(bytes_of_shape)
        if refusal is not None:
            self.journal.note(Kind.REFUSE, refusal_cause(refusal), bytes_of_shape)
            return refusal
        before = self.changes.refused
        self.changes.grow(growths, cause)
        self._surplus.forget()
        if self.ranks.direct:
            self.settle()
            if self.changes.refused != before:
                return Refusal("budget", sum(bytes_of_shape), 0, sample_is_stale=False)
        return None

    def _came(self, growths: Sequence[Growth]) -> None:
        self._wish.came(self._of_devices(growths))

    def _wish_for(self, growths: list[Growth], least: list[Growth]) -> None:
        of_device = self._of_devices(growths)
        self._wish.make(of_device, self._of_devices(least))
        self.journal.waits(of_device)

    def _of_devices(self, growths: Sequence[Growth]) -> dict[str, int]:
        of_device = dict.fromkeys(self.seats, 0)
        for m in self.ranks.members:
            of_device[m.device_uuid] += growths[m.shape].granules * self._granule
        return of_device

    def wait_until(self, until_ns: int) -> None:
        """Tell observers when the waiting ends, in monotonic time; 0: never."""
        self._wish.until_ns = until_ns

    def end_wish(self) -> None:
        """What was wished for is no longer needed, or has come."""
        self._wish.end()
        self.journal.resumes()
