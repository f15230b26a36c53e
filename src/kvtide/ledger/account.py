"""A pool's account: grants, refunds, what its holder created and released, samples, figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvtide.errors import LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.holdings import headroom_now, set_aside_now, waiting
from kvtide.ledger.policy import judge
from kvtide.ledger.records import Granted, PoolFigures, Refusal
from kvtide.ledger.retirement import remove_pool
from kvtide.ledger.sampling import Taken, is_stale, take_sample
from kvtide.units import format_size

if TYPE_CHECKING:
    from kvtide.ledger.ledger import Ledger

__all__ = ["Account"]

_STEP: Final = w.RECORD_WORDS
_CHARGES_AT: Final = w.POOLS_AT + w.P_CHARGE
_OWNERS_AT: Final = w.POOLS_AT + w.P_INSTANCE


class Account:
    """One pool's record. From `Ledger.enroll` (its holder) or `Ledger.account` (a scheduler).

    The holder is the process that has the memory: it holds the record's lease, and alone calls
    `created`, `released` and `sample`, from one thread. Grants and refunds may come from any
    process.
    """

    def __init__(
        self, ledger: Ledger, slot: int, generation: int, sampler: Callable[[], int] | None
    ) -> None:
        """Use `Ledger.enroll` or `Ledger.account`."""
        self.key = f"{slot}:{generation}"
        self._ledger = ledger
        self._file = ledger.file
        self._words = ledger.file.words
        self._slot = slot
        self._generation = generation
        self._sampler = sampler
        self._taken: Taken | None = None
        self._at = w.pool_at(slot)
        self._charge = self._at + w.P_CHARGE
        self._instance: int = self._words[self._at + w.P_INSTANCE]
        self._ceiling_bytes = ledger.spec.total_bytes - ledger.spec.margin_bytes
        self._limit = w.instance_at(self._instance) + w.I_LIMIT
        self._owed: deque[int] = deque()

    @property
    def live(self) -> bool:
        """Whether the record is still this account's."""
        if self._file.closed is not None:
            return False
        self._file.check()
        return self._words[self._at] == self._generation

    @property
    def charge_bytes(self) -> int:
        """Grants not refunded yet; 0 once the record is retired."""
        return self._words[self._charge] if self.live else 0

    @property
    def owed_bytes(self) -> int:
        """Refunds that the ledger was too busy for; they are retried at the next change."""
        return sum(self._owed)

    # ---- charges ----

    def grant(self, asked_bytes: int) -> Granted | Refusal:
        """Charge so many bytes more, before they are created.

        Raises
        ------
        ValueError
            The size is negative.
        LedgerError
            The ledger is closed, or is not the one at its path any more.
        """
        if asked_bytes < 0:
            raise ValueError(f"cannot grant {asked_bytes} bytes")
        file, words = self._file, self._words
        if self._ledger.owing:
            self._ledger.pay()
        try:
            if not file.begin(hasty=True):
                return Refusal("busy", asked_bytes, 0, False)
            if words[self._at] != self._generation:
                file.check_whole()
                return Refusal("retired", asked_bytes, 0, False)
            end = w.POOLS_AT + words[w.H_POOLS_HIGH] * _STEP
            charges = words[_CHARGES_AT:end:_STEP].tolist()
            charged_bytes = sum(charges)
            if len(charges) <= self._slot or min(charges) < 0:
                raise LedgerError(file.damaged())
            # Whatever stands there, more than that nobody has published.
            budget_bytes: int = min(words[w.H_BUDGET], self._ceiling_bytes)
            limit_bytes: int | None = words[self._limit]
            own_bytes = 0
            if limit_bytes == w.NONE:
                limit_bytes = None
            else:
                mine = self._instance
                owners = words[_OWNERS_AT:end:_STEP].tolist()
                own_bytes = sum(c for c, o in zip(charges, owners, strict=True) if o == mine)
            withheld_bytes = headroom_now(words)
            withheld_bytes += set_aside_now(
                words, self._instance, asked_bytes, budget_bytes - withheld_bytes
            )
            verdict = judge(
                asked_bytes,
                budget_bytes=budget_bytes,
                charged_bytes=charged_bytes,
                limit_bytes=limit_bytes,
                instance_charged_bytes=own_bytes,
                withheld_bytes=withheld_bytes,
            )
            if verdict.reason is None:
                words[self._charge] += asked_bytes
                return Granted(asked_bytes)
            return Refusal(
                verdict.reason,
                asked_bytes,
                verdict.available_bytes,
                verdict.reason == "budget" and is_stale(words),
            )
        finally:
            file.end()

    def refund(self, size_bytes: int, *, wake: bool = True) -> None:
        """Give back charge for memory that is really gone, and wake who waits for it.

        Nobody is woken without `wake`: for what was granted a moment ago and never created, since
        two who refuse each other a part of what both need would else wake each other for ever.

        When the ledger is busy the refund is kept, and made at this process's next change. It does
        nothing once the record is retired: its charge has gone with it.

        Raises
        ------
        ValueError
            The size is negative.
        LedgerError
            It is more than the charge; or as `grant` does.
        """
        if size_bytes < 0:
            raise ValueError(f"cannot refund {size_bytes} bytes")
        file, words, ledger = self._file, self._words, self._ledger
        if ledger.owing:
            ledger.pay()
        waits: list[tuple[int, int]] = []
        try:
            if not file.begin(hasty=True):
                self._owed.append(size_bytes)
                ledger.owing.add(self)
                return
            self._lower(words, size_bytes)
            if wake:
                waits = waiting(words, self._instance)
        finally:
            file.end()
        if waits:
            ledger.bell.ring(waits)

    def _lower(self, words: memoryview, size_bytes: int) -> None:
        if words[self._at] != self._generation:
            return
        charge_bytes = words[self._charge]
        if size_bytes > charge_bytes:
            raise LedgerError(
                f"a refund of {format_size(size_bytes)} is more than the charge of pool "
                f"{self.key}, {format_size(charge_bytes)}"
            )
        words[self._charge] = charge_bytes - size_bytes

    def pay_owed(self, words: memoryview) -> None:
        """Under the lock: make the refunds that were kept."""
        while self._owed:
            self._lower(words, self._owed.popleft())

    # ---- the holder's own words ----

    def created(self, size_bytes: int) -> None:
        """Right after a create. Nothing once the record is gone."""
        words = self._own_words()
        if words[self._at] == self._generation:
            words[self._at + w.P_CREATED] += size_bytes

    def released(self, size_bytes: int) -> None:
        """Right before a release. What then fails to be released is `created` again."""
        words = self._own_words()
        if words[self._at] == self._generation:
            words[self._at + w.P_RELEASED] += size_bytes

    def sample(self) -> bool:
        """Measure free memory and publish the budget; whether the budget is as new as this call.

        False when the ledger is busy, or pools kept ending meanwhile.
        """
        self._own_words()
        assert self._sampler is not None
        return take_sample(self._ledger, self._sampler, self._taken)

    def take_headroom(self, told: Callable[[], int]) -> None:
        """From now on each sample tells, too, how many bytes its instance's headroom serves for.

        What an instance has taken for its activations is free no more, and need not be left free.
        """
        self._taken = Taken(w.instance_at(self._instance), told)

    def publish(self, figures: PoolFigures) -> None:
        """Tell the others about the pool; from one process and thread. Takes no lock."""
        self._file.check()
        words, at = self._words, self._at
        if words[at] != self._generation:
            return
        sequence = words[at + w.P_FIGURES_SEQUENCE] | 1
        words[at + w.P_FIGURES_SEQUENCE] = sequence
        for word, figure in enumerate(figures, at + w.P_BLOCKS_MAPPED):
            words[word] = figure
        words[at + w.P_FIGURES_SEQUENCE] = sequence + 1

    def close(self) -> None:
        """End the record, if this is the holder, and wake who waits.

        What was released, or never created, is refunded: it is there for others at once. Whatever
        charge is left falls with the budget, until a sample finds what it stood for.
        """
        if self._sampler is None or self._file.closed is not None:
            return
        self._sampler = None
        self._ledger.forget(self)
        words, at = self._words, self._at
        waits: list[tuple[int, int]] = []
        try:
            # On a miss the lease alone goes, and whoever notices retires the record.
            if self._file.begin() and words[at] == self._generation:
                self.pay_owed(words)
                held_bytes = max(0, words[at + w.P_CREATED] - words[at + w.P_RELEASED])
                words[self._charge] = min(words[self._charge], held_bytes)
                remove_pool(words, self._slot)
                waits = waiting(words, self._instance)
        except LedgerError:
            pass  # the file is not the one any more, or damaged: nobody looks at this record
        finally:
            self._file.drop_lease(self._at)
            self._file.end()
        if waits:
            self._ledger.bell.ring(waits)
        self._ledger.try_to_end_dead()

    def _own_words(self) -> memoryview:
        self._file.check()
        if self._sampler is None:
            raise LedgerError(f"pool {self.key} is held by another process, or was closed")
        return self._words
