"""When to try again, and what has been in nobody's use for long enough to go."""

from __future__ import annotations

from collections import deque

__all__ = ["Backoff", "Surplus"]

_FIRST_SECONDS, _LONGEST_SECONDS = 0.25, 4.0
_LOOK_SECONDS = 1.0
_LOOKS = 3


class Backoff:
    """Pauses that double with every failure in a row. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._pause = _FIRST_SECONDS
        self._until = 0.0

    def ready(self, now: float) -> bool:
        """Whether the pause is over."""
        return now >= self._until

    def failed(self, now: float) -> None:
        """Begin a pause, twice as long as the one before."""
        self._until = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_SECONDS)

    def hurry(self) -> None:
        """Something was freed: try at once. Another failure pauses longer all the same."""
        self._until = 0.0

    def succeeded(self) -> None:
        """Begin anew with the shortest pause."""
        self._pause, self._until = _FIRST_SECONDS, 0.0


class Surplus:
    """How many blocks were free at every look of the last seconds; one comparison a step."""

    def __init__(self) -> None:
        self._lowest: int | None = None
        self._looks: deque[int] = deque(maxlen=_LOOKS)
        self._next = 0.0

    def see(self, free: int, now: float) -> int:
        """Note a count of free blocks; once a second, those that were free for three, else 0."""
        if self._lowest is None or free < self._lowest:
            self._lowest = free
        if now < self._next:
            return 0
        self._next = now + _LOOK_SECONDS
        self._looks.append(self._lowest)
        self._lowest = free
        return min(self._looks) if len(self._looks) == _LOOKS else 0

    def forget(self) -> None:
        """They were given back, or others have come: count anew."""
        self._lowest = None
        self._looks.clear()
