"""A device whose calls fail on demand, before they have any effect; for fault injection."""

from collections.abc import Callable

from kvtide.device import DeviceInfo, Fence, Handle
from kvtide.device.base import Device
from kvtide.errors import DeviceError

__all__ = ["FaultyDevice"]


class FaultyDevice:
    """Wraps a device; `fails(number, verb)` says whether the call of that number fails.

    Calls are counted from 0 since the last `arm`. A failing `create` raises like the others, or
    answers None with `create_answers_none`.
    """

    def __init__(self, device: Device, *, create_answers_none: bool = False) -> None:
        self.device = device
        self.calls: list[str] = []
        self._none = create_answers_none
        self._fails: Callable[[int, str], bool] = lambda number, verb: False

    def arm(self, fails: Callable[[int, str], bool]) -> None:
        self.calls = []
        self._fails = fails

    def disarm(self) -> None:
        self.arm(lambda number, verb: False)

    @property
    def info(self) -> DeviceInfo:
        return self.device.info

    def _step(self, verb: str) -> None:
        number = len(self.calls)
        self.calls.append(verb)
        if self._fails(number, verb):
            raise DeviceError(f"injected: {verb}, call {number}")

    def reserve(self, size_bytes: int) -> int:
        self._step("reserve")
        return self.device.reserve(size_bytes)

    def unreserve(self, address: int, size_bytes: int) -> None:
        self._step("unreserve")
        self.device.unreserve(address, size_bytes)

    def create(self, size_bytes: int) -> Handle | None:
        try:
            self._step("create")
        except DeviceError:
            if self._none:
                return None
            raise
        return self.device.create(size_bytes)

    def map(self, address: int, handle: Handle) -> None:
        self._step("map")
        self.device.map(address, handle)

    def unmap(self, address: int, handle: Handle) -> None:
        self._step("unmap")
        self.device.unmap(address, handle)

    def release(self, handle: Handle) -> None:
        self._step("release")
        self.device.release(handle)

    def zero(self, runs) -> None:
        self._step("zero")
        self.device.zero(runs)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        self._step("copy")
        self.device.copy(destination, source, size_bytes)

    def fence(self) -> Fence:
        self._step("fence")
        return self.device.fence()

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def close(self) -> None:
        self.device.close()
