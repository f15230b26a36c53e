"""The typed errors of kvtide. Expected refusals (no memory now) are values, not errors.

Every message is written for the person who must act: what was asked, what there is, who holds
it, what to do. `UsageError` and its kinds end a command with status 2, all others with 1.
"""

from __future__ import annotations

__all__ = [
    "DeviceError",
    "KvtideError",
    "LedgerBusyError",
    "LedgerError",
    "MessageError",
    "NameTakenError",
    "NeverFitsError",
    "RankLostError",
    "SettingsError",
    "StaleRevisionError",
    "UnsupportedError",
    "UsageError",
]


class KvtideError(Exception):
    """Anything that kvtide refuses or cannot do."""

    exit_status = 1


class UsageError(KvtideError):
    """A command or a setting that cannot be understood."""

    exit_status = 2


class SettingsError(UsageError):
    """A `KVTIDE_*` variable with a value that is not accepted, or that contradicts another."""


class DeviceError(KvtideError):
    """A device cannot be opened, lacks what is needed, or one of its calls failed."""


class LedgerError(KvtideError):
    """A ledger file or its directory cannot be trusted or used."""


class LedgerBusyError(LedgerError):
    """The ledger stayed locked, or kept changing under a reader; names the holder."""


class NameTakenError(LedgerError):
    """An instance of this name is live already."""


class NoInstanceError(LedgerError):
    """No live instance has this name, there."""


class StaleRevisionError(LedgerError):
    """A change was made against an older revision than the current one."""


class NeverFitsError(KvtideError):
    """No state of the ledger could meet this need; names who holds what and what would work."""


class MessageError(KvtideError):
    """A message between the processes of one engine that cannot be understood."""


class RankLostError(KvtideError):
    """A worker of this engine has ended or does not answer: the engine cannot go on."""


class UnsupportedError(KvtideError):
    """An engine, a version or a feature that kvtide does not support, by name."""
