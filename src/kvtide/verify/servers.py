"""Start real vLLM servers, wait until they answer, know their processes, and stop them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from kvtide.errors import KvtideError
from kvtide.verify.client import Completion, complete, post

__all__ = ["Options", "Server", "ServerError", "free_port", "session_pids"]

_HOST = "127.0.0.1"
_LITTLE = "0.05"
_POLL_SECONDS = 0.1
_LOG_TAIL_LINES = 25
_PORTS = range(18000, 32000)
_PORT_TRIES = 100

# One thread computes, on any core: an engine that spins on all cores starves its neighbour.
_ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # lets a test drop the prefix cache
    "PYTHONUNBUFFERED": "1",
}


class ServerError(KvtideError):
    """A server did not start, or died; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the checks ask of any engine's server.

    Attributes
    ----------
    kv_bytes
        Size of the KV cache where that is given; else it is the engine's share of the device.
    flags
        Further flags of the engine, as somebody wrote them: they come last, and win.
    """

    dtype: str
    max_model_len: int
    kv_dtype: str = "auto"
    tp: int = 1
    kv_bytes: int | None = None
    sleep_mode: bool = False
    flags: tuple[str, ...] = ()


class Server:
    """One `vllm serve` process, in a session of its own, with all that it starts.

    A server of another engine derives from this and has its own command, flags and calls.

    Parameters
    ----------
    model
        Directory of the model.
    log
        File that takes the server's output.
    arguments
        Further arguments of `vllm serve`.
    environ
        Variables on top of this process's own, from which every `KVTIDE*` is taken out first:
        without one here the server is a native one.
    python
        The interpreter of the environment that has vLLM.
    """

    engine: ClassVar[str] = "vllm"
    # Distributions, one of which the engine comes in.
    distributions: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    # Where its servers can be started.
    backends: ClassVar[tuple[str, ...]] = ("host", "cuda")
    # What its CPU engine does not run as shipped, or not usefully, of the tiny models, and why.
    lacks: ClassVar[dict[str, str]] = {}
    # Lines of its log that tell of its own end alone, and what says that it has begun: vLLM ends
    # its core by force, and the task that waits for the core's answers may have the last word.
    end_mark: ClassVar[str] = "[shutdown]"
    end_noise: ClassVar[str] = r"\[async_llm\.py:\d+\]"
    # Under which name the checks ask for the model.
    served: ClassVar[str] = "m"

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.model = model
        self.log = log
        self.port = free_port()
        self.killed: list[int] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVTIDE")}
        self._environ = inherited | _ENVIRON | dict(environ or {})
        self._command = [
            *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", _HOST, "--port", str(self.port), "--enforce-eager", *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def flags(cls, options: Options, model: Path) -> list[str]:
        """The engine's arguments for these options, with the figures of its prefix cache."""
        flags = [
            *("--served-model-name", cls.served, "--dtype", options.dtype),
            *("--max-model-len", str(options.max_model_len), "--enable-prompt-tokens-details"),
            *("--kv-cache-dtype", options.kv_dtype, "--tensor-parallel-size", str(options.tp)),
        ]
        if options.kv_bytes is not None:
            # With a size of its own vLLM takes no share; but it asks that one be free at its start.
            flags += ["--kv-cache-memory-bytes", str(options.kv_bytes)]
            flags += ["--gpu-memory-utilization", _LITTLE]
        return flags + (["--enable-sleep-mode"] if options.sleep_mode else [])

    @classmethod
    def environ_for(cls, options: Options, backend: str) -> dict[str, str]:
        """Further variables: on the host each rank computes on a core of its own."""
        if backend != "host":
            return {}
        binds = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(options.tp)))}
        return binds if options.tp > 1 else {}

    def ask(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_tokens: int,
        *,
        concurrency: int | None = None,
        margins: bool = False,
    ) -> list[Completion]:
        """Have it continue prompts, all at once unless told otherwise."""
        return complete(
            self.url,
            prompts,
            max_tokens=max_tokens,
            model=self.served,
            concurrency=concurrency,
            margins=margins,
        )

    def drop_cache(self) -> None:
        """Have it forget its prefix cache; an answer other than 200 raises."""
        post(self.url, "/reset_prefix_cache")

    @property
    def url(self) -> str:
        """Where the server answers, without a slash at the end."""
        return f"http://{_HOST}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether the process was started, also if it has ended since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process that was started, which is also the session of all others."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> Server:
        """Start the process and return at once."""
        assert self._process is None, "a server starts once"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout_seconds: float = 300.0) -> Server:
        """Wait until the server answers.

        Raises
        ------
        ServerError
            It ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self.healthy():
            if (status := self.exit_status()) is not None:
                raise ServerError(f"the server ended with status {status}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server did not answer within {timeout_seconds:.0f} s\n{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)
        return self

    def healthy(self) -> bool:
        """Whether the server answers now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def exit_status(self) -> int | None:
        """The exit status of the started process, None while it runs."""
        return None if self._process is None else self._process.poll()

    def pids(self) -> list[int]:
        """Every living process of this server, even where its parent is gone already."""
        return [] if self._process is None else session_pids(self._process.pid)

    def role_pid(self, role: str) -> int:
        """The process whose name holds this word: `EngineCor`, `Worker`."""
        found = [p for p in self.pids() if role in _process_name(p)]
        if len(found) != 1:
            raise ServerError(f"{len(found)} processes named {role!r}, not one\n{self.log_tail()}")
        return found[0]

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """What the log says of an error: kvtide's own lines, then the end, with its path."""
        text = self.log.read_text(errors="replace").splitlines()
        own = [line for line in text[:-lines] if line.startswith("kvtide: ")]
        return "\n".join([*own, f"the end of {self.log}:", *text[-lines:]])

    def stop(self, timeout_seconds: float = 90.0) -> None:
        """Ask the server to end, and kill what is left of it after the timeout.

        `killed` lists what had to be killed.
        """
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + timeout_seconds
        while (left := self.pids()) and time.monotonic() < deadline:
            self._process.poll()  # reaps it, so that it leaves the session
            time.sleep(_POLL_SECONDS)
        self.killed = left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def __enter__(self) -> Server:
        return self if self.started else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def session_pids(session: int) -> list[int]:
    """The living processes of a session, oldest first; zombies do not count."""
    return sorted(pid for pid, state, sid in _processes() if sid == session and state != "Z")


def _processes() -> Iterator[tuple[int, str, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended since it was listed
        state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
        yield int(entry.name), state, int(session)


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def free_port(*, but: int = 0) -> int:
    """A port that is free now, from outside of where the kernel picks one for whoever asks.

    Never `but`, which is meant for something else.

    Raises
    ------
    ServerError
        None was found.
    """
    for _ in range(_PORT_TRIES):
        port = random.choice(_PORTS)
        if port == but:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port was found from {_PORTS.start} to {_PORTS.stop - 1}")
