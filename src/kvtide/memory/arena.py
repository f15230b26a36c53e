"""One range of reserved addresses and the extents of physical memory mapped in it."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvtide.device.base import Device, Handle
from kvtide.errors import DeviceError
from kvtide.memory.backing import Backing, Meter, Quarantined
from kvtide.memory.extents import Span, merge
from kvtide.memory.transaction import Transaction

__all__ = ["Arena"]

_log = logging.getLogger(__name__)


class Arena:
    """Extents that come and go at fixed addresses.

    Offsets and sizes are multiples of the device's granularity. Every change happens whole or not
    at all; memory that the device does not take back is quarantined and stays counted as created.
    Not for several threads at once. Nothing here waits for the engine's queued work: shrink and
    split only what it can no longer touch.

    Parameters
    ----------
    device
        Where the memory is.
    size_bytes
        Of the reservation; no memory is taken.
    meter
        Told of every create and release.

    Raises
    ------
    DeviceError
        The addresses cannot be reserved.
    """

    def __init__(self, device: Device, size_bytes: int, meter: Meter) -> None:
        self.device = device
        self.size_bytes = size_bytes
        self.address = device.reserve(size_bytes)
        self._info = device.info
        self._backing = Backing(device, meter)
        self._handles: dict[int, Handle] = {}
        self._offsets: list[int] = []
        self._view: tuple[Span, ...] | None = ()
        self._mapped_bytes = 0
        # Reservations that a split could not give back, since memory is stuck there.
        self._scratch: dict[int, int] = {}
        self._closed = False

    @property
    def extents(self) -> tuple[Span, ...]:
        """What is mapped, one span a handle, sorted."""
        if self._view is None:
            self._view = tuple(Span(at, self._handles[at].size_bytes) for at in self._offsets)
        return self._view

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped and may be used."""
        return self._mapped_bytes

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """What the device did not take back."""
        return self._backing.quarantined

    @property
    def quarantined_bytes(self) -> int:
        """Bytes that the device did not take back; they stay charged."""
        return self._backing.quarantined_bytes

    def grow(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Map memory, all zeros, at exactly these spans, one handle each.

        Returns
        -------
        bool
            False when the device has not so much memory, or a quarantined mapping is in the way:
            nothing has changed then.

        Raises
        ------
        ValueError
            A span is not of whole granules, is outside, or is mapped already.
        DeviceError
            A call failed for another reason; all is undone.
        """
        wanted = sorted(spans)
        self._check_growable(wanted)
        backing, base = self._backing, self.address
        runs = [(base + offset, size_bytes) for offset, size_bytes in merge(wanted)]
        if backing.blocks(runs):
            return False
        grown = []
        with Transaction() as change:
            for offset, size_bytes in wanted:
                handle = backing.create(size_bytes, change)
                if handle is None:
                    return False
                backing.map(base + offset, handle, change)
                grown.append((offset, handle))
            if not self._info.creates_zeros:
                self.device.zero(runs)
            change.commit()
        self._add(grown)
        return True

    def shrink(self, spans: Iterable[tuple[int, int]]) -> None:
        """Unmap and release these spans, each exactly one or more whole extents.

        What the device does not take back is quarantined (`quarantined_bytes` tells how much).

        Raises
        ------
        ValueError
            A span is not made of whole extents; nothing has changed then.
        """
        backing, base = self._backing, self.address
        for offset in [at for run in merge(spans) for at in self._extents_of(*run)]:
            handle = self._remove(offset)
            backing.unmap(base + offset, handle)
            backing.release(handle)

    def split(self, span: Span, keep: Sequence[Span]) -> bool:
        """Exchange an extent for handles of just some of its parts, contents and places kept.

        Parameters
        ----------
        span
            One whole extent, which nothing reads or writes meanwhile.
        keep
            Parts of it of whole granules, one handle each; the rest is released. Their sum is
            created before the extent is released, and has to be granted on top of it.

        Returns
        -------
        bool
            False when the device has no memory for the parts or a call failed: nothing has
            changed then.

        Raises
        ------
        ValueError
            These are no parts of one whole extent; nothing has changed then.
        DeviceError
            A call failed and the extent could not be put back: it is no longer mapped.
        """
        parts = sorted(keep)
        self._check_splittable(span, parts)
        if parts == [span]:
            return True
        scratch = 0
        handles = []
        here, whole = self.address + span.offset_bytes, self._handles[span.offset_bytes]
        try:
            with Transaction() as change:
                for part in parts:
                    handle = self._backing.create(part.size_bytes, change)
                    if handle is None:
                        return False
                    handles.append(handle)
                # The whole stays readable at a second place while its parts take its first.
                scratch = self.device.reserve(span.size_bytes)
                change.undo_by(self._drop_scratch, scratch, span.size_bytes)
                self._backing.map(scratch, whole, change)
                self.device.unmap(here, whole)
                change.undo_by(self._put_back, span.offset_bytes, whole)
                for part, handle in zip(parts, handles, strict=True):
                    self._backing.map(self.address + part.offset_bytes, handle, change)
                for part in parts:
                    source = scratch + part.offset_bytes - span.offset_bytes
                    self.device.copy(self.address + part.offset_bytes, source, part.size_bytes)
                self.device.fence().wait()
                change.commit()
        except DeviceError as error:
            if self._handles.get(span.offset_bytes) is not whole:
                raise
            _log.warning("an extent of %d bytes was not split: %s", span.size_bytes, error)
            return False
        self._remove(span.offset_bytes)
        offsets = [part.offset_bytes for part in parts]
        self._add(list(zip(offsets, handles, strict=True)))
        self._backing.unmap(scratch, whole)
        self._backing.release(whole)
        self._drop_scratch(scratch, span.size_bytes)
        return True

    def lift(self, extent: Span) -> bool:
        """Release one whole extent, or else leave it as it was; whether it is gone.

        Raises
        ------
        DeviceError
            It is unmapped, and could neither be released nor mapped again.
        """
        handle = self._remove(extent.offset_bytes)
        if self._backing.take_back(self.address + extent.offset_bytes, handle):
            return True
        self._add([(extent.offset_bytes, handle)])
        return False

    def retry_quarantined(self) -> int:
        """Try again to take back what is quarantined.

        Returns
        -------
        int
            Bytes that are gone now, and no longer charged to anything that is mapped.
        """
        gone_bytes = self._backing.retry()
        scratch, self._scratch = self._scratch, {}
        for address, size_bytes in scratch.items():
            self._drop_scratch(address, size_bytes)
        return gone_bytes

    def close(self) -> None:
        """Release everything and give the addresses back; what fails stays quarantined.

        Raises
        ------
        DeviceError
            The addresses could not be given back.
        """
        if self._closed:
            return
        self.shrink(self.extents)
        self.retry_quarantined()
        if not self._backing.blocks([(self.address, self.size_bytes)]):
            self.device.unreserve(self.address, self.size_bytes)
            self._closed = True

    def _put_back(self, offset: int, handle: Handle) -> None:
        """Undo the unmapping of an extent, or give it up."""
        try:
            self.device.map(self.address + offset, handle)
        except DeviceError:
            self._remove(offset)
            self._backing.quarantine(handle)
            raise

    def _drop_scratch(self, address: int, size_bytes: int) -> None:
        if not self._backing.blocks([(address, size_bytes)]):
            try:
                self.device.unreserve(address, size_bytes)
                return
            except DeviceError as error:
                _log.warning("%d bytes of addresses are lost for now: %s", size_bytes, error)
        self._scratch[address] = size_bytes

    def _add(self, extents: Sequence[tuple[int, Handle]]) -> None:
        before = len(self._handles)
        self._handles.update(extents)
        assert len(self._handles) == before + len(extents), "an extent is there already"
        self._offsets += [offset for offset, _ in extents]
        self._offsets.sort()
        self._mapped_bytes += sum([handle.size_bytes for _, handle in extents])
        self._view = None

    def _remove(self, offset: int) -> Handle:
        handle = self._handles.pop(offset)
        del self._offsets[bisect_left(self._offsets, offset)]
        self._mapped_bytes -= handle.size_bytes
        self._view = None
        return handle

    def _extents_of(self, start: int, size_bytes: int) -> list[int]:
        at, end = start, start + size_bytes
        offsets = self._offsets[bisect_left(self._offsets, at) : bisect_left(self._offsets, end)]
        for offset in offsets:
            if offset != at:
                break
            at += self._handles[offset].size_bytes
        if not offsets or at != end:
            raise ValueError(f"{Span(start, size_bytes)} is not made of whole extents")
        return offsets

    def _check_growable(self, wanted: Sequence[tuple[int, int]]) -> None:
        self._check_granules(wanted, 0, self.size_bytes)
        offsets, handles = self._offsets, self._handles
        for offset, size_bytes in wanted:
            after = bisect_left(offsets, offset + size_bytes)
            if after:
                before = offsets[after - 1]
                if before + handles[before].size_bytes > offset:
                    raise ValueError(
                        f"{Span(offset, size_bytes)} is mapped already, at least in part"
                    )

    def _check_splittable(self, span: Span, parts: list[Span]) -> None:
        handle = self._handles.get(span.offset_bytes)
        if handle is None or handle.size_bytes != span.size_bytes:
            raise ValueError(f"{span} is not one whole extent")
        if not parts:
            raise ValueError("nothing is kept: shrink instead of splitting")
        self._check_granules(parts, span.offset_bytes, span.end_bytes)

    def _check_granules(self, spans: Sequence[tuple[int, int]], start: int, end: int) -> None:
        granule = self._info.granularity_bytes
        at = start
        for offset, size_bytes in spans:
            behind = offset + size_bytes
            if size_bytes <= 0 or size_bytes % granule or offset % granule:
                raise ValueError(
                    f"{Span(offset, size_bytes)} is not made of granules of {granule} bytes"
                )
            if offset < at or behind > end:
                raise ValueError(
                    f"{Span(offset, size_bytes)} overlaps another one or is outside {start}..{end}"
                )
            at = behind
