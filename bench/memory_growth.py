"""Memory of a server's processes over time: native vLLM and one under kvtide, with the same load.

    python bench/memory_growth.py --minutes 14 --out bench/results/memory_growth.json

Bursts of random sizes go to both at once, and the one under kvtide has its limit changed and is
trimmed meanwhile. oneDNN, which computes, keeps something of every shape that it has seen, hundreds
of MiB in minutes, native as well: here it keeps one, so that what else grows can be seen. Run it in
an environment that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtide import control
from kvtide.bench.machine import machine
from kvtide.units import MIB
from kvtide.verify.client import complete, random_prompts
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.servers import Server
from soak import DEVICE_BYTES, KIND, anonymous_bytes, is_tracker

LOOK_SECONDS = 20.0


def processes(server: Server) -> dict[str, int]:
    """MiB that each has for itself alone."""
    found = {}
    for pid in server.pids():
        if not is_tracker(pid):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found[name] = anonymous_bytes(pid) >> 20
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=14)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dice = random.Random(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        work, ledgers = Path(directory), Path(directory) / "ledgers"
        model = ensure_model(KIND, work / "models")
        flags = ["--served-model-name", "m", "--dtype", dtype_of(KIND)]
        flags += ["--max-model-len", "2048", "--block-size", "32"]
        elastic = {
            "KVTIDE": "1",
            "KVTIDE_NAME": "b",
            "KVTIDE_DIR": str(ledgers),
            "KVTIDE_HOST_DEVICE": work.name,
            "KVTIDE_HOST_MEMORY": str(DEVICE_BYTES),
        }
        servers = {
            name: Server(
                model,
                log=work / f"{name}.log",
                arguments=flags,
                environ={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", **environ},
            )
            for name, environ in (
                ("native", {"VLLM_CPU_KVCACHE_SPACE": "1"}),
                ("kvtide", elastic),
            )
        }
        try:
            for server in servers.values():
                server.start().wait_ready()
            begun, answered = time.monotonic(), 0
            with ThreadPoolExecutor(2) as pool:
                while (now := time.monotonic()) - begun < options.minutes * 60:
                    prompts = random_prompts(
                        dice.randrange(99), dice.randrange(4, 28), dice.randrange(16, 480)
                    )
                    ask = {"max_tokens": dice.randrange(8, 64), "model": "m"}
                    urls = [server.url for server in servers.values()]
                    bursts = [pool.submit(complete, url, prompts, **ask) for url in urls]
                    if dice.random() < 0.5:
                        size = dice.choice((None, 64 * MIB, 128 * MIB))
                        control.limit("b", size, directory=ledgers)
                    else:
                        control.trim("b", to=32 * MIB, directory=ledgers)
                    for burst in bursts:
                        answers = burst.result()
                        assert all(answer.error is None for answer in answers)
                        answered += len(answers)
                    if not rows or now - begun - rows[-1]["seconds"] > LOOK_SECONDS:
                        looks = {name: processes(server) for name, server in servers.items()}
                        rows.append({"seconds": round(now - begun), "answered": answered, **looks})
                        print(rows[-1], flush=True)
        finally:
            for server in servers.values():
                server.stop()
    grown = {
        name: {p: rows[-1][name][p] - size for p, size in rows[0][name].items()} for name in servers
    }
    print(f"grown by MiB: {grown}")
    if options.out is not None:
        result = {"machine": machine(), "grown_mib": grown, "looks": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
