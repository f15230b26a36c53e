"""Growth and waste of the 8B shape inside vLLM: kvtide against kvcached 0.1.6, both its layouts.

python bench/gpu/against_kvcached.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

from drive import Running, save

COUNTS = [1, 100, 1000, 10_000]


def main() -> int:
    setup = {"model": "8b", "utilization": 0.35, "prefix_caching": False}
    systems = {
        "kvtide": {**setup, "system": "kvtide", "runner": 1},
        "kvcached, default layout": {**setup, "system": "kvcached", "runner": 1},
        "kvcached, per layer": {**setup, "system": "kvcached", "runner": 1, "contiguous": False},
    }
    results: dict[str, Any] = {}
    for name, one in systems.items():
        commands: list[list[Any]] = [["growth", 512, 9]]
        if name != "kvcached, per layer":
            commands.append(["excess", COUNTS])
        results[name] = Running(one, commands).finish()
        for line in results[name]:
            print(name, json.dumps({k: v for k, v in line.items() if k != "log"}), flush=True)
    save("against_kvcached", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
