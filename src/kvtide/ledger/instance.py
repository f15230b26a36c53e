"""An instance's record: its name, its state, its limit as it is now, its wish."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtide.errors import LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.holdings import demands_now, headroom_now, set_aside_now, waiting
from kvtide.ledger.policy import judge
from kvtide.ledger.reading import STATES
from kvtide.ledger.records import NON_KV_SOURCES, State
from kvtide.ledger.retirement import live_pools
from kvtide.ledger.wake import Waker

if TYPE_CHECKING:
    from kvtide.ledger.ledger import Ledger

__all__ = ["Instance"]

_MAX_BYTES: Final = (1 << 62) - 1


class Instance:
    """One engine, on one device. From `Ledger.register` (its owner) or `Ledger.instance`.

    Attributes
    ----------
    key
        Hand it to the engine's other processes: `Ledger.instance(key)`.
    """

    def __init__(self, ledger: Ledger, slot: int, generation: int, *, owner: bool) -> None:
        """Use `Ledger.register` or `Ledger.instance`."""
        self.key = f"{slot}:{generation}"
        self.slot = slot
        self.generation = generation
        self._ledger = ledger
        self._file = ledger.file
        self._at = w.instance_at(slot)
        self._owner = owner
        self.name = w.get_text(ledger.file.raw, self._at + w.I_NAME, w.NAME_BYTES)

    @property
    def live(self) -> bool:
        """Whether the record is still this instance's."""
        if self._file.closed is not None:
            return False
        self._file.check()
        return self._file.words[self._at] == self.generation

    @property
    def limit_bytes(self) -> int | None:
        """The ceiling over all its pools on the device, as it is now."""
        limit_bytes: int = self._own_words()[self._at + w.I_LIMIT]
        return None if limit_bytes == w.NONE else limit_bytes

    @property
    def limit_revision(self) -> int:
        """How many times the limit and the other terms were set."""
        revision: int = self._own_words()[self._at + w.I_REVISION]
        return revision

    @property
    def wish_bytes(self) -> int:
        """The unmet need that is registered, or 0."""
        wish_bytes: int = self._own_words()[self._at + w.I_WISH]
        return wish_bytes

    def set_state(self, state: State) -> None:
        """Tell observers what the instance does."""
        self._own_words()[self._at + w.I_STATE] = STATES.index(state)

    def wish(self, size_bytes: int, *, least_bytes: int | None = None, until_ns: int = 0) -> None:
        """Register an unmet need, beyond what the instance holds idle itself, or clear it with 0.

        Every call with a size wakes the holders who should give something now; the place in the
        queue is that of the first call since the last 0. Repeat it every few seconds: who does not
        for 10 s holds nobody up any more.

        Parameters
        ----------
        size_bytes
            All that could be used at once.
        least_bytes
            The part without which nothing goes on; None: all of it. 0: it goes on anyway, and the
            wish holds up nobody of the same priority.
        until_ns
            For observers: when the waiting ends, in monotonic time; 0: never.

        Raises
        ------
        ValueError
            A size is negative or no 64-bit number.
        """
        least_bytes = size_bytes if least_bytes is None else least_bytes
        if not 0 <= least_bytes <= size_bytes <= _MAX_BYTES:
            raise ValueError(f"cannot wish for {size_bytes} bytes, {least_bytes} at least")
        words, at = self._own_words(), self._at
        if size_bytes == 0:
            if words[at + w.I_WISH]:
                words[at + w.I_WISH] = 0
                # What was set aside for it is to be had by those who were refused for its sake.
                self._ledger.bell.ring(waiting(words, self.slot))
            return
        now_ns = time.monotonic_ns()
        # Who could go on so far has not waited yet.
        if words[at + w.I_WISH] == 0 or (least_bytes and not words[at + w.I_WISH_LEAST]):
            words[at + w.I_WISH_SINCE_NS] = now_ns
        words[at + w.I_WISH_SEEN_NS] = now_ns
        words[at + w.I_WISH_LEAST] = least_bytes
        words[at + w.I_DEADLINE_NS] = until_ns
        words[at + w.I_WISH] = size_bytes
        self.call_holders()

    def call_holders(self) -> None:
        """Wake the holders who should give something now; who stays silent is passed over."""
        self._file.check_whole()
        # What is needed was stored before the holders' figures are read, as they publish before
        # they ask for demands: at least one of the two sees the other.
        words, called, now_ns = self._file.words, [], time.monotonic_ns()
        for slot in demands_now(words):
            at = w.instance_at(slot)
            if slot != self.slot:
                called.append((slot, words[at]))
                if words[at + w.I_CALLED_NS] <= words[at + w.I_ANSWERED_NS]:
                    words[at + w.I_CALLED_NS] = now_ns
        self._ledger.bell.ring(called)

    # ---- what it loads beside its pools ----

    def reserve(self, size_bytes: int) -> None:
        """Announce memory that the engine is about to take beside its pools; adds up.

        From here on nobody is granted it, and who holds idle memory is called to make room. It is
        no charge: it comes off the budget until it is loaded, and the samples find it after that.

        Raises
        ------
        ValueError
            The size is negative or no 64-bit number.
        """
        if not 0 <= size_bytes <= _MAX_BYTES:
            raise ValueError(f"cannot reserve {size_bytes} bytes")
        self._own_words()
        with self._file.change() as words:
            at = self._at
            if words[at + w.I_RESERVED] + size_bytes > _MAX_BYTES:
                raise ValueError(f"cannot reserve {size_bytes} bytes more")
            if words[at + w.I_RESERVED] == 0:
                words[at + w.I_RESERVED_NS] = time.monotonic_ns()
            # The budget first: dying in between leaves it too low, which the next sample mends.
            words[w.H_BUDGET] -= size_bytes
            words[at + w.I_RESERVED] += size_bytes
        self.call_holders()

    def loaded(self, size_bytes: int) -> None:
        """So much more of what was reserved is taken by now; say so after it is taken.

        Raises
        ------
        ValueError
            The size is negative or no 64-bit number.
        """
        if not 0 <= size_bytes <= _MAX_BYTES:
            raise ValueError(f"cannot have loaded {size_bytes} bytes")
        self._own_words()
        with self._file.change() as words:
            loaded_bytes = words[self._at + w.I_LOADED] + size_bytes
            words[self._at + w.I_LOADED] = min(loaded_bytes, _MAX_BYTES)

    def measured(self, non_kv_bytes: int, source: str) -> None:
        """All is loaded: what the instance holds beside its pools; the reservation is over.

        `source` is one of `records.NON_KV_SOURCES`. What was reserved beyond it is to be had as
        soon as somebody samples.

        Raises
        ------
        ValueError
            The size is negative or no 64-bit number.
        """
        if not 0 <= non_kv_bytes <= _MAX_BYTES:
            raise ValueError(f"cannot hold {non_kv_bytes} bytes")
        self._own_words()
        with self._file.change() as words:
            at = self._at
            words[at + w.I_RESERVED] = 0
            words[at + w.I_LOADED] = 0
            words[at + w.I_NON_KV] = non_kv_bytes
            words[at + w.I_NON_KV_SOURCE] = NON_KV_SOURCES.index(source)

    @property
    def room_bytes(self) -> int:
        """What the budget has left; below zero while what is reserved has to be made room for."""
        words = self._own_words()
        charged_bytes = sum(words[w.pool_at(s) + w.P_CHARGE] for s in live_pools(words))
        room_bytes: int = words[w.H_BUDGET] - charged_bytes
        return room_bytes

    def obtainable_bytes(self, asked_bytes: int) -> int:
        """What a grant of so much would find. Without the lock: it may be judged otherwise yet."""
        words = self._own_words()
        budget_bytes: int = words[w.H_BUDGET]
        headroom_bytes = headroom_now(words)
        aside_bytes = set_aside_now(words, self.slot, asked_bytes, budget_bytes - headroom_bytes)
        pools = [w.pool_at(slot) for slot in live_pools(words)]
        mine = [at for at in pools if words[at + w.P_INSTANCE] == self.slot]
        return judge(
            asked_bytes,
            budget_bytes=budget_bytes,
            charged_bytes=sum(words[at + w.P_CHARGE] for at in pools),
            limit_bytes=self.limit_bytes,
            instance_charged_bytes=sum(words[at + w.P_CHARGE] for at in mine),
            withheld_bytes=headroom_bytes + aside_bytes,
        ).available_bytes

    # ---- being woken, and the end ----

    def waker(self) -> Waker:
        """Bind the socket at which this instance is woken; in the scheduler's process, once."""
        return Waker(self._file.directory_fd, self._file.path.stem, self.slot, self.generation)

    def close(self) -> None:
        """Give up the name, if this is the owner; the record stays while it has pools."""
        if self._owner and self._file.closed is None:
            self._owner = False
            with suppress(LedgerError):
                self._file.check()
                self._file.words[self._at + w.I_WISH] = 0
            self._file.drop_lease(self._at)
            self._ledger.try_to_end_dead()
            # Its scheduler may have been ended by force, and left it.
            self._ledger.bell.sweep([(self.slot, self.generation)])

    def _own_words(self) -> memoryview:
        self._file.check()
        if not self.live:
            raise LedgerError(f"instance {self.name!r} was retired: its owner died or closed it")
        return self._file.words
