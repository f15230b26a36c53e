"""Fault points: a process ends, stops or is interrupted between any two steps of the protocol.

A point is a line of kvtide's own code, and so lies before every single store, lock, driver call and
message: `Account.grant: words[self._charge] += asked_bytes`. Nothing in kvtide knows of them: a
child traces itself, so they cost nothing where nobody asks for them.
"""

from __future__ import annotations

import linecache
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import kvtide

Act = Literal["kill", "stop", "interrupt"]
_ROOT = str(Path(kvtide.__file__).parent)
PARTS = tuple(f"{_ROOT}/{part}/" for part in ("ledger", "memory", "device", "ranks"))
# They only read, and how long depends on what else runs on the machine.
_PURE = (f"{_ROOT}/device/census.py", f"{_ROOT}/ledger/damage.py", f"{_ROOT}/ledger/layout.py")
# It asks for the file's size now and then: when, the clock decides.
_PURE_FUNCTIONS = ("_look",)


class Point(NamedTuple):
    """One line of code; `name` is for people."""

    file: str
    line: int
    function: str

    @classmethod
    def of(cls, frame: FrameType) -> Point:
        code = frame.f_code
        function = getattr(code, "co_qualname", code.co_name)
        return cls(code.co_filename, frame.f_lineno, function)

    @property
    def name(self) -> str:
        return f"{self.function}: {linecache.getline(self.file, self.line).strip()}"


class InterruptedHereError(SystemExit):
    """What a handler of SIGTERM raises, in the middle of whatever runs."""


class Points:
    """Counts the points that this process passes, and acts at one of them.

    `at` is the number of the passage, counted over all points. Without it they are only recorded.
    Before it acts it tells where it is: its point, and those of the callers.
    """

    def __init__(
        self,
        act: Act = "kill",
        at: int | None = None,
        parts=PARTS,
        tell: Callable[[list[Point]], object] = lambda stack: None,
    ) -> None:
        self.passed: list[Point] = []
        self.count = 0
        self._act = act
        self._at = at
        self._parts = parts
        self._tell = tell
        self._ours: dict[CodeType, bool] = {}

    def run(self, body: Callable[[], object]) -> None:
        sys.settrace(self._enter)
        try:
            body()
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = (
                code.co_filename.startswith(self._parts)
                and code.co_filename not in _PURE
                and code.co_name not in _PURE_FUNCTIONS
            )
        return self._step if ours else None

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            if self._at is None:
                self.passed.append(Point.of(frame))
            elif self.count == self._at:
                self._tell([Point.of(f) for f, _ in traceback.walk_stack(frame)])
                self._act_now()
            self.count += 1
        return self._step

    def _act_now(self) -> None:
        if self._act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise InterruptedHereError(143)
