"""An instance's record: its name, its state, its limit as it is now, its wish."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtide.errors import LedgerError
from kvtide.ledger import layout as w
from kvtide.ledger.holdings import demands_now
from kvtide.ledger.reading import STATES
from kvtide.ledger.records import State
from kvtide.ledger.wake import Waker

if TYPE_CHECKING:
    from kvtide.ledger.ledger import Ledger

__all__ = ["Instance"]


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
        return self._file.closed is None and self._file.words[self._at] == self.generation

    @property
    def limit_bytes(self) -> int | None:
        """The ceiling over all its pools on the device, as it is now."""
        limit_bytes: int = self._own_words()[self._at + w.I_LIMIT]
        return None if limit_bytes == w.NONE else limit_bytes

    @property
    def limit_revision(self) -> int:
        """How many times the limit was set."""
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

    def wish(self, size_bytes: int) -> None:
        """Register an unmet need, beyond what the instance holds idle itself, or clear it with 0.

        Every call with a size wakes the holders who should give something now; the place in the
        queue is that of the first call since the last 0.

        Raises
        ------
        ValueError
            The size is negative or no 64-bit number.
        """
        if not 0 <= size_bytes < 1 << 62:
            raise ValueError(f"cannot wish for {size_bytes} bytes")
        words, at = self._own_words(), self._at
        if size_bytes == 0:
            words[at + w.I_WISH] = 0
            return
        if words[at + w.I_WISH] == 0:
            words[at + w.I_WISH_SINCE_NS] = time.monotonic_ns()
        words[at + w.I_WISH] = size_bytes
        # Stored before the holders' figures are read, as they publish before they ask for demands:
        # at least one of the two sees the other.
        self._ledger.bell.ring(
            (slot, words[w.instance_at(slot)]) for slot in demands_now(words) if slot != self.slot
        )

    def waker(self) -> Waker:
        """Bind the socket at which this instance is woken; in the scheduler's process, once."""
        return Waker(self._file.directory_fd, self._file.path.stem, self.slot, self.generation)

    def close(self) -> None:
        """Give up the name, if this is the owner; the record stays while it has pools."""
        if self._owner and self._file.closed is None:
            self._owner = False
            self._file.words[self._at + w.I_WISH] = 0
            self._file.drop_lease(self._at)
            self._ledger.try_to_end_dead()

    def _own_words(self) -> memoryview:
        if self._file.closed is not None:
            raise LedgerError(self._file.closed)
        if not self.live:
            raise LedgerError(f"instance {self.name!r} was retired: its owner died or closed it")
        return self._file.words
