"""One line in the log for each event that matters: in words, or as JSON on request."""

from __future__ import annotations

import json
import logging
import time
from typing import Final

from kvtide.observe.tally import CAUSE_NAMES, KIND_NAMES, Cause, Kind
from kvtide.units import format_size

__all__ = ["LOGGED", "event_text", "log_event", "set_up"]

_log: Final = logging.getLogger("kvtide.events")
_MATTERS: Final = {Kind.WAIT, Kind.RESUME, Kind.QUARANTINE, Kind.SPLIT, Kind.PREEMPT}
_MATTERING_SHRINKS: Final = {
    *(Cause.OTHERS, Cause.LIMIT, Cause.TRIM, Cause.MIN, Cause.PRIORITY, Cause.RESERVATION),
    Cause.HEADROOM,
}
LOGGED: Final = frozenset(
    {(kind, cause) for kind in _MATTERS for cause in range(len(CAUSE_NAMES))}
    | {(Kind.SHRINK, cause) for cause in _MATTERING_SHRINKS}
)
"""Kinds and causes of events that are a line in the log."""

_PLAIN: Final = {
    Kind.GROW: "grows by",
    Kind.REFUSE: "is refused",
    Kind.MISS: "lacks",
    Kind.EVICT: "evicts",
}
_WHY: Final = {
    Cause.OTHERS: "that others wish for",
    Cause.LIMIT: "above its limit",
    Cause.TRIM: "since it was trimmed",
    Cause.MIN: "that is another's guaranteed minimum",
    Cause.PRIORITY: "to one of higher priority",
    Cause.RESERVATION: "for one that starts",
    Cause.HEADROOM: "that is to stay free",
}


def event_text(kind: int, cause: int, size_bytes: int, detail: int) -> str:
    """An event in words, without who it happened to."""
    size, why = format_size(size_bytes), CAUSE_NAMES[cause]
    if kind == Kind.WAIT:
        return f"waits for {size}"
    if kind == Kind.RESUME:
        return f"goes on after waiting {detail / 1e9:.3f} s"
    if kind == Kind.QUARANTINE:
        return f"lost {size}: its device does not take it back"
    if kind == Kind.SHRINK:
        return f"gives back {size} {_WHY.get(cause, f'({why})')}"
    if kind == Kind.SPLIT:
        return f"splits {detail} extents to give back {size}"
    if kind == Kind.PREEMPT:
        requests = "a request" if detail == 1 else f"{detail} requests"
        return f"preempts {requests} to give back {size} {_WHY.get(cause, f'({why})')}"
    if kind in _PLAIN:
        return f"{_PLAIN[kind]} {size} ({why})"
    return f"{KIND_NAMES[kind]} {size} ({why})"


def log_event(name: str, device: str, kind: int, cause: int, size_bytes: int, detail: int) -> None:
    """Log an event of an instance on a device, if it is one that matters."""
    if (kind, cause) not in LOGGED:
        return
    level = logging.WARNING if kind == Kind.QUARANTINE else logging.INFO
    if _log.isEnabledFor(level):
        event = {
            "instance": name,
            "device": device,
            "event": KIND_NAMES[kind],
            "cause": CAUSE_NAMES[cause],
            "bytes": size_bytes,
            "detail": detail,
        }
        text = event_text(kind, cause, size_bytes, detail)
        _log.log(level, "kvtide: %s on %s %s", name, device, text, extra={"kvtide": event})


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | record.__dict__.get("kvtide", {}))


def set_up(form: str) -> None:
    """Send what kvtide logs to standard error, as text or json; events not at all if none."""
    logger = logging.getLogger("kvtide")
    for handler in list(logger.handlers):
        if handler.get_name() == "kvtide":
            logger.removeHandler(handler)
    logger.propagate = True
    if form == "none":
        _log.setLevel(logging.CRITICAL)
        return
    handler = logging.StreamHandler()
    handler.set_name("kvtide")
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _log.setLevel(logging.NOTSET)
    logger.propagate = False
