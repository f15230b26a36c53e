"""What looking costs a server: vLLM under kvtide, looked at in every second round of requests.

    .venvs/vllm-0.30.0/bin/python bench/observe_serving.py --looker .venvs/dev/bin/python \
        --out bench/results/observe_serving.json

One server with its counters, events and JSON log lines on. In the rounds with lookers `kvtide
serve` has a client on its stream and is scraped once a second, and `kvtide record` writes all down,
both five times a second; in the others nobody looks. Pairs are interleaved and swap who goes first.
The spread is what rounds without lookers differ by among themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtide.bench.machine import cpu_seconds, machine
from kvtide.bench.pairs import paired_ratios
from kvtide.bench.stream import closed_loop
from kvtide.verify.client import random_prompts
from kvtide.verify.models import make_model
from kvtide.verify.servers import Server

_SETTLE_S = 1.0
KVTIDE = ("-c", "from kvtide.cli import main; main()")


class Lookers:
    """All that may look at an engine at once, until closed."""

    def __init__(self, python: str, directory: Path, scratch: Path) -> None:
        environ = os.environ | {"KVTIDE_DIR": str(directory)}
        trace = scratch / "trace.json"
        trace.unlink(missing_ok=True)
        self._record = subprocess.Popen(
            [python, *KVTIDE, "record", "-o", str(trace)],
            env=environ,
            stdout=subprocess.DEVNULL,
        )
        self._serve = subprocess.Popen(
            [python, *KVTIDE, "serve", "--port", "0", "--interval", "0.2"],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._serve.stdout is not None
        self._url = self._serve.stdout.readline().partition("/#token=")[0]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=t) for t in (self._listen, self._scrape)]
        self.views = self.scrapes = 0
        for thread in self._threads:
            thread.start()
        # What they take to start is no part of looking.
        while not trace.exists() or not trace.stat().st_size:
            time.sleep(0.05)
        time.sleep(_SETTLE_S)

    def _listen(self) -> None:
        with urllib.request.urlopen(f"{self._url}/api/v1/events") as stream:
            for line in stream:
                self.views += line.startswith(b"data:")
                if self._stop.is_set():
                    return

    def _scrape(self) -> None:
        while not self._stop.wait(1.0):
            with urllib.request.urlopen(f"{self._url}/metrics") as answer:
                self.scrapes += bool(answer.read())

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for process in (self._serve, self._record):
            process.terminate()
            process.wait(30)
        assert self._serve.stdout is not None
        self._serve.stdout.close()


def measure(looker: str, pairs: int, requests: int, tokens: int) -> dict[str, Any]:
    """Tokens a second and CPU seconds of the server's processes, of every round."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        model = make_model("llama-wide", scratch / "model")
        server = Server(
            model,
            log=scratch / "server.log",
            arguments=(
                *("--served-model-name", "m", "--max-model-len", "2048", "--block-size", "32"),
                *("--dtype", "float32"),
            ),
            environ={
                "KVTIDE": "1",
                "KVTIDE_DIR": str(directory / "ledgers"),
                "KVTIDE_HOST_DEVICE": directory.name,
                "KVTIDE_HOST_MEMORY": "256MiB",
                "KVTIDE_LOG": "json",
            },
        )
        stack.enter_context(server).wait_ready(900)

        def round_(seed: int) -> tuple[float, float]:
            prompts = random_prompts(seed, requests, 192)
            before = cpu_seconds(server.pids())
            seconds, timings = closed_loop(server.url, "m", prompts, tokens, 8)
            assert all(t.error is None for t in timings)
            return requests * tokens / seconds, cpu_seconds(server.pids()) - before

        for seed in range(2):
            round_(10_000 + seed)
        rounds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        views = scrapes = 0
        for pair in range(pairs):
            for looked in (True, False) if pair % 2 else (False, True):
                lookers = None
                if looked:
                    lookers = Lookers(looker, directory / "ledgers", scratch)
                else:
                    time.sleep(_SETTLE_S)
                try:
                    rounds[looked].append(round_(2 * pair + looked))
                finally:
                    if lookers is not None:
                        lookers.close()
                        views, scrapes = views + lookers.views, scrapes + lookers.scrapes
                print(pair, "on" if looked else "off", *rounds[looked][-1], flush=True)
    figures: dict[str, Any] = {"pairs": pairs, "requests": requests, "output_tokens": tokens}
    figures |= {"views": views, "scrapes": scrapes}
    for i, name in enumerate(("tokens_per_s", "server_cpu_s")):
        on, off = ([r[i] for r in rounds[looked]] for looked in (True, False))
        figures[name] = {
            "on": [round(v, 2) for v in on],
            "off": [round(v, 2) for v in off],
            "on_to_off": paired_ratios(on, off),
            "off_to_the_off_before": paired_ratios(off[1:], off[:-1]),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--looker", default=sys.executable, help="A Python with kvtide[serve].")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    figures = {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "serving": measure(given.looker, given.pairs, given.requests, given.tokens),
    }
    for name in ("tokens_per_s", "server_cpu_s"):
        shown = figures["serving"][name]
        print(name, shown["on_to_off"], shown["off_to_the_off_before"])
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")
    # Within the spread: the median pair is none that the rounds without lookers would not show.
    spread = figures["serving"]["tokens_per_s"]["off_to_the_off_before"]
    median = figures["serving"]["tokens_per_s"]["on_to_off"]["median"]
    return int(not spread["min"] <= median <= spread["max"])


if __name__ == "__main__":
    sys.exit(main())
