"""Visits every state of a protocol that can be reached, checking each."""

from __future__ import annotations

from collections import deque
from typing import Any


def explore(rules: Any, most: int = 2_000_000) -> int:
    """Visit every state that can be reached; how many. An invariant's failure carries the way."""
    start = rules.canonical(rules.start)
    seen: dict[Any, tuple[Any, str]] = {start: (None, "start")}
    todo = deque([start])
    while todo:
        s = todo.popleft()
        try:
            rules.check(s)
            for what, after in rules.steps(s):
                after = rules.canonical(after)
                if after not in seen:
                    seen[after] = (s, what)
                    todo.append(after)
        except AssertionError as error:
            way = []
            at: Any = s
            while at is not None:
                at, what = seen[at]
                way.append(what)
            error.args = (error.args[0] + "\n  " + "\n  ".join(reversed(way)),)
            raise
        assert len(seen) <= most, f"more than {most} states"
    return len(seen)
