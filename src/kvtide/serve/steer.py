"""What the API changes, through the one implementation that the commands use."""

from __future__ import annotations

from pathlib import Path

from kvtide.errors import LedgerError, UsageError
from kvtide.ledger import Ledger

__all__ = ["set_limit"]


def set_limit(
    directory: Path, name: str, limit_bytes: int | None, revision: int | None, device: str | None
) -> dict[str, int]:
    """Set an instance's limit wherever it runs, or on one device; new revisions by device.

    Raises
    ------
    LedgerError
        No instance has this name there.
    UsageError
        The limit cannot be one, or a revision is given for several devices.
    StaleRevisionError
        Somebody changed it since.
    """
    paths = []
    for path in Ledger.existing(directory):
        with Ledger.read(path) as observer:
            snapshot = observer.snapshot()
        if device in (None, snapshot.spec.uuid) and any(i.name == name for i in snapshot.instances):
            paths.append(path)
    if not paths:
        raise LedgerError(
            f"no instance {name!r} runs {'here' if device is None else f'on {device}'}"
        )
    if revision is not None and len(paths) > 1:
        raise UsageError("a revision is of one device: say which")
    done = {}
    for path in paths:
        ledger = Ledger.attach(path)
        try:
            done[ledger.spec.uuid] = ledger.set_limit(name, limit_bytes, revision)
        finally:
            ledger.close()
    return done
