"""An engine that starts while a neighbour takes and frees memory: it does, at the same capacity.

    python bench/gpu/starts.py        some 80 seconds

The neighbour is a plain process that knows nothing of a ledger; every few milliseconds it takes or
frees up to 8 GiB. kvtide starts alone, then beside it; a native engine beside it is shown too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any

from drive import Running, save

CHURN = """
import random, sys, threading, time, torch
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
rng, held, changes = random.Random(7), [], 0
print("up", flush=True)
while not stop.is_set():
    if held and (len(held) > 4 or rng.random() < 0.5):
        held.pop(rng.randrange(len(held)))
        torch.cuda.empty_cache()
    else:
        held.append(torch.empty(rng.randrange(1, 8 << 30), dtype=torch.uint8, device="cuda"))
    changes += 1
    time.sleep(rng.random() * 0.05)
print(changes, flush=True)
"""

PHASE: list[list[Any]] = [["generate", "a", 32, 512, 32, 3]]


def main() -> int:
    setup = {"model": "dense", "utilization": 0.3}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        environ = {"KVTIDE_DIR": directory}
        alone = Running({**setup, "system": "kvtide"}, PHASE, **environ).finish()
        churn = subprocess.Popen(
            [sys.executable, "-c", CHURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert churn.stdout is not None
        churn.stdout.readline()
        beside = Running({**setup, "system": "kvtide"}, PHASE, **environ)
        native = Running({**setup, "system": "native"}, PHASE)
        results = {"alone": alone, "beside": beside.finish(), "native beside": native.finish()}
        told, _ = churn.communicate(timeout=30)
    summary = {
        "changes": int(told.split()[-1]),
        **{
            f"blocks, {name}": next((r["blocks"] for r in lines if "blocks" in r), None)
            for name, lines in results.items()
        },
    }
    digests = [[r["digests"] for r in lines if "digests" in r] for lines in results.values()]
    good = digests[0] == digests[1] and digests[0] != []
    good &= summary["blocks, alone"] == summary["blocks, beside"]
    print(summary, "ok" if good else "FAILED", flush=True)
    save("starts", {"summary": summary, **results})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
