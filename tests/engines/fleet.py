"""Servers of the engine tests: on a host device of their own, watched by the kernel's figures."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtide.device.census import used_bytes
from kvtide.ledger import InstanceView, Ledger, Snapshot
from kvtide.verify.client import Completion, complete
from kvtide.verify.models import VOCABULARY, dtype_of, ensure_model
from kvtide.verify.servers import Server

PROBE = Path(__file__).parent / "probe"
_SAMPLE_SECONDS = 0.02
_QUICK_SECONDS = 0.005


def prompts_of(seed: int, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of random tokens; the seed is printed, and shown when a test fails."""
    print(f"prompts: seed {seed}, {count} of {shortest} to {longest} tokens")
    source = random.Random(seed)
    return [
        [source.randrange(10, VOCABULARY) for _ in range(source.randint(shortest, longest))]
        for _ in range(count)
    ]


def until(
    condition: Callable[[], object],
    seconds: float,
    what: str,
    instead: Callable[[], object] = lambda: "",
) -> float:
    """Wait until something holds; the seconds that it took. Fails after so many.

    `instead` says what there is while it does not hold.
    """
    started = time.monotonic()
    while not condition():
        took = time.monotonic() - started
        assert took < seconds, f"not within {seconds} s: {what} {instead()}"
        time.sleep(0.005)
    return time.monotonic() - started


def processes(pids: Sequence[int]) -> dict[int, str]:
    """What runs in these processes, as the kernel has it: command, state, threads' states."""
    found = {}
    for pid in pids:
        try:
            tasks = [
                (task / "stat").read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{pid}/task").iterdir()
            ]
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            found[pid] = f"{command[-120:]} ({''.join(sorted(tasks))})"
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def tokens_of(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    """What was generated, where every request was answered."""
    assert [a.error for a in answers if a.error] == []
    return [a.tokens for a in answers]


class Fleet:
    """One host device, one directory of ledgers, and the servers started on them.

    Parameters
    ----------
    directory
        An empty one, for the ledger and the logs.
    models
        Where models are kept.
    size_bytes
        Of the device.
    """

    def __init__(self, directory: Path, models: Path, size_bytes: int) -> None:
        self.directory = directory
        self.ledgers = directory / "ledgers"
        self.size_bytes = size_bytes
        self.uuid = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self._models = models
        self._started: list[Server] = []

    @property
    def environ(self) -> dict[str, str]:
        """What puts a server on this device."""
        return {
            "KVTIDE": "1",
            "KVTIDE_DIR": str(self.ledgers),
            "KVTIDE_HOST_DEVICE": self.uuid,
            "KVTIDE_HOST_MEMORY": str(self.size_bytes),
        }

    def start(
        self,
        kind: str,
        name: str | None,
        *arguments: str,
        environ: dict[str, str] | None = None,
        probe: bool = True,
    ) -> Server:
        """Start a server under kvtide by this name, or a native one (None); it is not ready yet."""
        given = {} if name is None else self.environ | {"KVTIDE_NAME": name}
        if name is None:
            # Of the size that kvtide gives: native servers take it from the machine otherwise.
            given["VLLM_CPU_KVCACHE_SPACE"] = "1"
        probing: list[str] = []
        if probe:
            paths = [str(PROBE), os.environ.get("PYTHONPATH")]
            given["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
            probing = ["--worker-extension-cls", "cache_probe.CacheProbe"]
        server = Server(
            ensure_model(kind, self._models),
            log=self.directory / f"{name or 'native'}-{len(self._started)}.log",
            arguments=["--dtype", dtype_of(kind), "--served-model-name", "m", *probing, *arguments],
            environ=given | (environ or {}),
        )
        self._started.append(server)
        return server.start()

    def stop(self) -> None:
        """Stop all that runs still, the last one first."""
        for server in reversed(self._started):
            server.stop()

    # What the ledger and the kernel say --------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The ledger now."""
        (path,) = Ledger.existing(self.ledgers)
        with Ledger.read(path) as observer:
            return observer.snapshot()

    def instance(self, name: str) -> InstanceView | None:
        """An instance, or None if there is none of this name."""
        found = [i for i in self.snapshot().instances if i.name == name]
        return found[0] if found else None

    def charge(self, name: str) -> int:
        """What an instance answers for; 0 without one."""
        instance = self.instance(name)
        return instance.charged_bytes if instance else 0

    def held_bytes(self) -> int:
        """What the kernel says that all processes hold of this device."""
        return used_bytes(self.uuid)


def ask(
    server: Server,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    concurrency: int | None = None,
) -> list[Completion]:
    """Have a server of a fleet continue prompts."""
    return complete(server.url, prompts, max_tokens=max_tokens, model="m", concurrency=concurrency)


class Asking:
    """Requests in the background, until joined."""

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        concurrency: int | None = None,
    ) -> None:
        pool = ThreadPoolExecutor(max_workers=1)
        self._answers = pool.submit(ask, server, prompts, max_tokens, concurrency)
        pool.shutdown(wait=False)

    @property
    def running(self) -> bool:
        """Whether not all are answered."""
        return not self._answers.done()

    def join(self) -> list[Completion]:
        """The answers."""
        return self._answers.result()


def ask_together(
    servers: Sequence[Server], prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[Completion]]:
    """Ask several servers the same at once."""
    asking = [Asking(server, prompts, max_tokens) for server in servers]
    return [one.join() for one in asking]


def likeliest(server: Server, prompt: Sequence[int]) -> dict[int, float]:
    """The next token's likeliest ids, and the logarithms of how likely they are."""
    asked = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 3,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        (best,) = json.load(answer)["choices"][0]["logprobs"]["top_logprobs"]
    return {int(token.removeprefix("token_id:")): value for token, value in best.items()}


def rpc(server: Server, method: str, *arguments: str) -> Any:
    """Call a method of the probe in a server's only worker."""
    body = json.dumps({"method": method, "args": arguments}).encode()
    request = urllib.request.Request(
        f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["results"][0]


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a device."""

    seconds: float
    budget_bytes: int
    charges: dict[str, int]
    wishes: dict[str, int]
    held_bytes: int
    releasing_bytes: int
    ceiling_bytes: int

    @property
    def charged_bytes(self) -> int:
        """All charges."""
        return sum(self.charges.values())


@dataclass
class Sampler:
    """Looks at a fleet's device every 20 ms while the block runs.

    A `quick` one looks every 5 ms, at the ledger alone: what the kernel counts takes longer.
    """

    fleet: Fleet
    samples: list[Sample] = field(default_factory=list)
    quick: bool = False

    def __enter__(self) -> Sampler:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        (path,) = Ledger.existing(self.fleet.ledgers)
        with Ledger.read(path) as observer:
            while not self._ended.wait(_QUICK_SECONDS if self.quick else _SAMPLE_SECONDS):
                snapshot = observer.snapshot()
                self.samples.append(
                    Sample(
                        time.monotonic(),
                        snapshot.budget_bytes,
                        {i.name: i.charged_bytes for i in snapshot.instances},
                        {i.name: i.wish_bytes for i in snapshot.instances},
                        snapshot.charged_bytes if self.quick else self.fleet.held_bytes(),
                        sum(p.figures.releasing_bytes for i in snapshot.instances for p in i.pools),
                        snapshot.spec.ceiling_bytes,
                    )
                )

    def peak(self, name: str) -> int:
        """The largest charge of an instance."""
        return max(s.charges.get(name, 0) for s in self.samples)


def assert_within_budget(samples: Sequence[Sample]) -> None:
    """Neither the charges nor what the kernel counts were ever more than the device lends.

    And no grant took the charges above the published budget. They may lie above it: a measurement
    that falls into a release finds that memory neither held nor free, and lowers the budget.
    """
    assert samples
    for before, sample in zip(samples[:1] + samples[:-1], samples, strict=True):
        assert sample.charged_bytes <= sample.ceiling_bytes, sample
        assert sample.held_bytes <= sample.ceiling_bytes, sample
        if sample.charged_bytes > sample.budget_bytes and sample is not before:
            rose = sample.charged_bytes > before.charged_bytes
            assert not rose or sample.budget_bytes < before.budget_bytes, (before, sample)


class Ballast:
    """A process that holds memory of a fleet's device outside the ledger."""

    def __init__(self, fleet: Fleet, size_bytes: int) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvtide.device.ballast", str(size_bytes)),
                *("--uuid", fleet.uuid, "--total", str(fleet.size_bytes)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.held_bytes = self._answer()

    def hold(self, size_bytes: int) -> int:
        """Hold so much from now on; what is held then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{size_bytes}\n")
        self._process.stdin.flush()
        self.held_bytes = self._answer()
        return self.held_bytes

    def _answer(self) -> int:
        assert self._process.stdout is not None
        word, _, number = self._process.stdout.readline().partition(" ")
        assert word == "held"
        return int(number)

    def close(self) -> None:
        """Let go of all and end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
