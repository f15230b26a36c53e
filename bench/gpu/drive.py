"""Start engines for the scripts here, collect their results, and say on what they ran."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")


class Running:
    """An engine that was started: its results as they come."""

    def __init__(
        self, setup: dict[str, Any], commands: list[list[Any]] | None = None, **environ: str
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
        self._reader = threading.Thread(target=self._read)
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
        assert self._process.stdin is not None
        before = len(self.results)
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.wait_result(before)

    def wait_result(self, before: int = 0) -> dict[str, Any]:
        while len(self.results) <= before:
            if not self.alive():
                self.finish()
                raise SystemExit(f"{self.setup} ended")
            time.sleep(0.002)
        return self.results[before]

    def close(self) -> list[dict[str, Any]]:
        """No more commands: let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
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
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = "timed out"
        self._reader.join(10)
        if status != 0:
            tail = "\n".join(self.log[-40:])
            print(f"--- {self.setup} ended with {status}\n{tail}\n---", flush=True)
            self.results.append({"command": "ended", "status": str(status), "log": tail})
        return self.results


def run(setup: dict[str, Any], commands: list[list[Any]], **environ: str) -> list[dict[str, Any]]:
    return Running(setup, commands, **environ).finish()


def versions() -> dict[str, Any]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

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


def save(name: str, results: dict[str, Any], directory: str | None = None) -> None:
    """Write results, with versions, to `OUT` or the given directory."""
    out = Path(directory or os.environ.get("OUT", "bench/results"))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"versions": versions(), **results}, indent=1) + "\n")
