"""Hold memory of the host device outside any ledger: `python -m kvtide.device.ballast 64MiB`.

Each line on standard input sets how much is held from then on (`0`, `96MiB`); each is answered by
`held BYTES`, which is less than asked where the device is full. It ends with standard input where
that is a pipe, and else when it is killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys

from kvtide.device.base import Handle
from kvtide.device.host import HOST_UUID, HostDevice
from kvtide.errors import KvtideError, UsageError
from kvtide.units import MIB, parse_size

__all__ = ["Ballast", "main"]

_CHUNK_BYTES = 2 * MIB


class Ballast:
    """An amount of a host device's memory, rounded up to 2 MiB."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._handles: list[Handle] = []

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return len(self._handles) * _CHUNK_BYTES

    def hold(self, size_bytes: int) -> int:
        """Take or give back until so much is held, or the device is full; bytes held then."""
        while self.held_bytes < size_bytes:
            handle = self._device.create(_CHUNK_BYTES)
            if handle is None:
                break
            self._handles.append(handle)
        while self.held_bytes - _CHUNK_BYTES >= size_bytes:
            self._device.release(self._handles.pop())
        return self.held_bytes


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtide.device.ballast", description=__doc__)
    parser.add_argument("size", help="how much to hold, such as 64MiB")
    parser.add_argument("--total", help="size of the device; default: all of the machine's memory")
    parser.add_argument("--uuid", default=HOST_UUID, help="which host device (default: host)")
    options = parser.parse_args(arguments)
    try:
        size_bytes = parse_size(options.size)
        total_bytes = parse_size(options.total) if options.total else _machine_bytes()
        ballast = Ballast(HostDevice(total_bytes, uuid=options.uuid))
        print(f"held {ballast.hold(size_bytes)}", flush=True)
    except KvtideError as error:
        print(f"ballast: {error}", file=sys.stderr)
        return error.exit_status
    for line in sys.stdin:
        try:
            print(f"held {ballast.hold(parse_size(line))}", flush=True)
        except UsageError as error:
            print(f"ballast: {error}", file=sys.stderr, flush=True)
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        signal.pause()
    return 0


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
