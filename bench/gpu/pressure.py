"""Tokens while a neighbour takes and returns extents, splitting in place: equal to native.

    python bench/gpu/pressure.py

One request at a time (`max_num_seqs=1`), so that batches do not depend on memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drive import Running, save

from kvtide.units import GIB, MIB


def main() -> int:
    ledger = Path(tempfile.mkdtemp(dir="/dev/shm"))
    environ = {"KVTIDE_DIR": str(ledger), "KVTIDE_BUDGET": str(300 * MIB)}
    phases: list[list[Any]] = [["generate", "p", 48, 900, 96, 5], ["generate", "q", 48, 400, 64, 6]]
    setup = {
        "model": "dense",
        "max_num_seqs": 1,
        "utilization": 0.1,
        "max_model_len": 2048,
        "eager": True,
    }
    reference_engine = Running({**setup, "system": "native", "kv_bytes": 4 * GIB}, phases)
    ready, go = ledger / "ready", ledger / "go"
    engine = Running(
        {**setup, "system": "kvtide"},
        [
            ["count_changes"],
            ["touch", str(ready)],
            ["wait_for", str(go)],
            *phases,
            ["figures"],
            ["changes"],
            ["preemptions"],
        ],
        **environ,
    )
    while not ready.exists() and engine.alive():
        engine.wait(0.1)
    neighbour = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("neighbour.py")), "200", "0.01"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    assert neighbour.stdin is not None
    assert neighbour.stdout is not None
    print("neighbour", neighbour.stdout.readline().strip(), flush=True)
    go.touch()
    elastic = engine.finish()
    told, _ = neighbour.communicate("\n", timeout=30)
    shutil.rmtree(ledger)
    figures = json.loads(told.strip().splitlines()[-1])
    native = reference_engine.finish()
    ours = [r for r in elastic if r["command"] == "generate"]
    reference = [r for r in native if r["command"] == "generate"]
    same = [
        sum(a == b for a, b in zip(o["digests"], r["digests"], strict=True))
        for o, r in zip(ours, reference, strict=True)
    ]
    for line in elastic:
        print({k: v for k, v in line.items() if k not in ("digests", "log")}, flush=True)
    print(json.dumps({"same": same, "of": [48, 48], "neighbour": figures}), flush=True)
    save("pressure", {"native": native, "kvtide": elastic, "neighbour": figures, "same": same})
    return 0 if same == [48, 48] else 1


if __name__ == "__main__":
    sys.exit(main())
