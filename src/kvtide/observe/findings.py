"""What `kvtide doctor` reports: settings with their source, and findings with what to do."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Finding", "Report", "SettingLine", "note", "ok", "wrong"]


class SettingLine(msgspec.Struct, frozen=True):
    """One setting as it would be now. `source`: environment or default."""

    variable: str
    value: str
    source: Literal["environment", "default"]
    meaning: str


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `advice` says what to do, where there is something to do."""

    about: str
    status: Literal["ok", "note", "wrong"]
    found: str
    advice: str | None = None


class Report(msgspec.Struct, frozen=True):
    """All of them. `ok` unless a finding is wrong."""

    ok: bool
    settings: tuple[SettingLine, ...]
    findings: tuple[Finding, ...]


def ok(about: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(about, "ok", found)


def note(about: str, found: str, advice: str | None = None) -> Finding:
    """Nothing is wrong, but it is good to know."""
    return Finding(about, "note", found, advice)


def wrong(about: str, found: str, advice: str) -> Finding:
    """Something that keeps kvtide from working."""
    return Finding(about, "wrong", found, advice)
