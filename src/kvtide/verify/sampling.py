"""Watch a device's ledger, and the kernel's own figures, at a fixed pace from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from kvtide.device.census import used_bytes
from kvtide.errors import KvtideError, LedgerBusyError, LedgerError
from kvtide.ledger import Ledger, Observer

__all__ = ["MemorySampler", "Sample", "peak"]

PERIOD_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """A device at one moment.

    Attributes
    ----------
    seconds
        Since the sampler started.
    charged_bytes
        By instance.
    kernel_bytes
        What the kernel says that all processes hold of the device; None where it was not asked.
    ceiling_bytes
        The most that the device lends. The budget is that at most, and less where a measurement
        falls into a release and finds that memory neither held nor free.
    """

    seconds: float
    budget_bytes: int
    charged_bytes: dict[str, int]
    kernel_bytes: int | None
    ceiling_bytes: int

    @property
    def total_charged_bytes(self) -> int:
        """What all instances answer for."""
        return sum(self.charged_bytes.values())


class MemorySampler:
    """Samples the host device's ledger in a directory, from the moment that there is one.

    Parameters
    ----------
    directory
        Of the ledgers; it need not be there yet.
    kernel_every
        Ask the kernel at every so many samples: that walks `/proc`, which takes some milliseconds.

    Attributes
    ----------
    samples
        All so far, oldest first; only ever appended to.
    """

    def __init__(self, directory: Path, *, kernel_every: int = 1) -> None:
        self.samples: list[Sample] = []
        self._kernel_every = kernel_every
        self._directory = directory
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._failure: KvtideError | None = None
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    @property
    def now_seconds(self) -> float:
        """The time on the samples' clock."""
        return time.monotonic() - self._started

    def since(self, seconds: float) -> Sequence[Sample]:
        """The samples from a moment on."""
        return [sample for sample in list(self.samples) if sample.seconds >= seconds]

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        observer = self._wait_for_ledger()
        if observer is None:
            return
        self._failure = None
        with observer:
            try:
                while not self._stop.wait(PERIOD_SECONDS):
                    self._sample(observer)
            except LedgerError as failure:
                self._failure = failure

    def _wait_for_ledger(self) -> Observer | None:
        while not self._stop.wait(PERIOD_SECONDS):
            try:
                for path in Ledger.existing(self._directory):
                    return Ledger.read(path)
            except LedgerError as failure:
                self._failure = failure  # somebody is just making it, or it stays like this
        return None

    def _sample(self, observer: Observer) -> None:
        try:
            snapshot = observer.snapshot()
        except LedgerBusyError:
            return
        ask_kernel = len(self.samples) % self._kernel_every == 0
        self.samples.append(
            Sample(
                seconds=self.now_seconds,
                budget_bytes=snapshot.budget_bytes,
                charged_bytes={i.name: i.charged_bytes for i in snapshot.instances},
                kernel_bytes=used_bytes(snapshot.spec.uuid) if ask_kernel else None,
                ceiling_bytes=snapshot.spec.ceiling_bytes,
            )
        )


def peak(samples: Sequence[Sample], name: str | None = None) -> int:
    """The most that an instance, or all together, were charged; 0 without samples."""
    return max(
        (s.total_charged_bytes if name is None else s.charged_bytes.get(name, 0) for s in samples),
        default=0,
    )
