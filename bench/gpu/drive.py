"""Start engines for the scripts here, collect their results, and say on what they ran."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtide.errors import LedgerBusyError, LedgerError
from kvtide.ledger import Ledger, Snapshot

ENGINE = Path(__file__).with_name("engine.py")
HOST_BYTES = 256 << 20  # the device without a GPU

# Holds a GPU's memory outside of any ledger, but for so many bytes, until its stdin ends.
_BALLAST = """
import sys, torch
torch.zeros(1, device="cuda")
held = torch.empty(max(0, torch.cuda.mem_get_info()[0] - int(sys.argv[1])), dtype=torch.uint8,
                   device="cuda")
print(held.nbytes, flush=True)
sys.stdin.read()
"""


class EngineEndedError(RuntimeError):
    """An engine ended, or did not answer in time; its log was printed."""


class Running:
    """An engine that was started: its results as they come. Leaving it as a context ends it."""

    def __init__(
        self, setup: dict[str, Any], commands: list[list[Any]] | None = None, /, **environ: str
    ) -> None:
        self.setup = setup
        self.results: list[dict[str, Any]] = []
        self.log: list[str] = []
        self._ended = False
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(ENGINE),
                json.dumps(setup),
                *(["-"] if commands is None else map(json.dumps, commands)),
            ],
            stdin=subprocess.PIPE if commands is None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                self.results.append(json.loads(line[7:]))
            else:
                self.log.append(line.rstrip())

    def ask(self, *command: Any) -> dict[str, Any]:
        """Give an engine that was started without commands one, and wait for its result."""
        return self.wait_result(self.tell(*command))

    def tell(self, *command: Any) -> int:
        """Give it a command and do not wait: the place that its result will have."""
        assert self._process.stdin is not None
        before = len(self.results)
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.finish(10)
            raise EngineEndedError(f"{self.setup} ended before {command}") from None
        return before

    def wait_result(self, before: int = 0, timeout: float = 400) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while len(self.results) <= before:
            if not self.alive() or time.monotonic() > deadline:
                self.finish(0.1)
                raise EngineEndedError(f"{self.setup} ended, or did not answer in {timeout:.0f} s")
            time.sleep(0.002)
        return self.results[before]

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self._process.kill()
            self._process.wait()
            self._ended = True

    def close(self) -> list[dict[str, Any]]:
        """No more commands: let it end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            print(f"{self.setup} had ended before it was closed", flush=True)
        return self.finish()

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def finish(self, timeout: float = 400) -> list[dict[str, Any]]:
        """All results; the end of the log with what went wrong. May be called again."""
        if self._ended:
            return self.results
        self._ended = True
        try:
            status: int | str = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = "timed out"
        self._reader.join(10)
        if status != 0:
            tail = "\n".join(self.log[-40:])
            print(f"--- {self.setup} ended with {status}\n{tail}\n---", flush=True)
            self.results.append({"command": "ended", "status": str(status), "log": tail})
        return self.results


class Memory(threading.Thread):
    """Samples the ledgers of a directory: a track every 50 ms, and the highest every 10."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory = directory
        self.ended = threading.Event()
        self.samples = self.high_bytes = self.above = 0
        self._before = (0, 0)  # charged and budget
        # Monotonic seconds; MiB of each instance; MiB of budget.
        self.track: list[tuple[float, dict[str, int], int]] = []

    def run(self) -> None:
        while not self.ended.wait(0.05):
            for path in Ledger.existing(self.directory):
                # Somebody may just be making it: the next look finds it.
                with suppress(LedgerError):
                    self._watch(path)

    def _watch(self, path: Path) -> None:
        with Ledger.read(path) as observer:
            while not self.ended.wait(0.01):
                with suppress(LedgerBusyError):
                    self._look(observer.snapshot())

    def _look(self, snapshot: Snapshot) -> None:
        charged_bytes = snapshot.charged_bytes
        self.samples += 1
        self.high_bytes = max(self.high_bytes, charged_bytes)
        # A budget may fall below the charges where others take memory; no grant may go above it.
        charged_before, budget_before = self._before
        granted = charged_bytes > charged_before and snapshot.budget_bytes >= budget_before
        most_bytes = snapshot.budget_bytes if granted else snapshot.spec.ceiling_bytes
        self.above += charged_bytes > most_bytes
        self._before = (charged_bytes, snapshot.budget_bytes)
        now = time.monotonic()
        if not self.track or now - self.track[-1][0] >= 0.05:
            held = {i.name: i.charged_bytes >> 20 for i in snapshot.instances}
            self.track.append((round(now, 3), held, snapshot.budget_bytes >> 20))

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def stop(self) -> dict[str, Any]:
        """What was seen."""
        self.ended.set()
        self.join(10)
        return {
            "samples": self.samples,
            "samples_above_budget": self.above,
            "high_water_mib": self.high_bytes / 2**20,
            "budget_mib": max((budget for _, _, budget in self.track), default=0),
            "track": changes(self.track),
        }


def changes(track: list[tuple[float, dict[str, int], int]]) -> list[Any]:
    """The samples that differ from the one before, or from the one after: enough to draw it."""
    told = [sample[1:] for sample in track]
    return [
        sample
        for n, sample in enumerate(track)
        if not 0 < n < len(track) - 1 or not told[n - 1] == told[n] == told[n + 1]
    ]


@contextmanager
def ledgers() -> Iterator[Path]:
    """A directory for the ledgers of one run."""
    directory = Path(tempfile.mkdtemp(prefix="kvtide-bench-", dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def ballast(leave_bytes: int) -> Iterator[int]:
    """Hold a GPU's memory outside of any ledger but for so many bytes; how much is held."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BALLAST, str(leave_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline() or 0)
    finally:
        process.stdin.close()
        process.wait(60)


def wait_for_file(path: Path | None) -> None:
    """How a script whose engines are up waits until it may measure."""
    while path is not None and not path.exists():
        time.sleep(0.2)


def host_environ(memory_bytes: int = HOST_BYTES) -> dict[str, str]:
    """What engines without a GPU need: one host device for all that this process starts."""
    return {
        "KVTIDE_HOST_DEVICE": f"bench-{os.getpid()}",
        "KVTIDE_HOST_MEMORY": str(memory_bytes),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def has_kvcached() -> bool:
    return find_spec("kvcached") is not None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, to three places."""
    ordered = sorted(values)
    return {
        "mean": round(statistics.fmean(ordered), 3),
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[len(ordered) * 99 // 100], 3),
    }


def versions() -> dict[str, Any]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    gpu = None
    if shutil.which("nvidia-smi"):
        gpu = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        **{n: version(n) for n in ("kvtide", "vllm", "torch", "cuda-bindings", "kvcached")},
    }


def without_log(line: dict[str, Any]) -> dict[str, Any]:
    """A result as a line can show it."""
    return {k: v for k, v in line.items() if k not in ("log", "digests", "ttft_ms", "torch")}


def table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows, the first of them the heads, in columns."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = zip(row, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip(), flush=True)


def save(name: str, results: dict[str, Any], directory: str | None = None) -> None:
    """Write results, with versions, to `OUT` or the given directory."""
    out = Path(directory or os.environ.get("OUT", "bench/results"))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"versions": versions(), **results}, indent=1) + "\n")
