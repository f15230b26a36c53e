"""Where an SGLang scheduler sleeps while memory is missing, and how it is woken there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from kvtide.engines.sglang.assembly import Rank
from kvtide.ledger import Ledger
from kvtide.ranks.watch import Watch

__all__ = ["Sleeper"]


class Sleeper:
    """Ends SGLang's own sleep and the one here when requests arrive or the ledgers call.

    The first rank's: it is woken for the devices of all, and the others wait for it.
    """

    def __init__(self, scheduler: Any, ranks: Sequence[Rank]) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        channels = scheduler.ipc_channels
        for socket in (channels.recv_from_tokenizer, channels.recv_from_rpc):
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._event, zmq.POLLIN)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.poller.register(self._event, zmq.POLLIN)
        ledgers = {r.uuid: (Ledger.attach(Path(r.ledger)), r.instance) for r in ranks}
        wakers = [ledger.instance(key).waker() for ledger, key in ledgers.values()]
        self.watch = Watch(wakers, [ledger for ledger, _ in ledgers.values()], self._wake)

    def _wake(self) -> None:
        """Called from the watch's thread."""
        os.eventfd_write(self._event, 1)

    def called(self) -> bool:
        """Whether the ledgers have called since this was asked last."""
        # In any case: the thread sets its flag before it writes here, and both sleeps end by it.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        called, self.watch.called = self.watch.called, False
        return called

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, so long at most."""
        self._poller.poll(seconds * 1000)
