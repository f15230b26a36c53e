"""Growth and waste of the 8B shape inside vLLM: kvtide against kvcached 0.1.6, both its layouts.

    python bench/gpu/against_kvcached.py        some 2 minutes

All engines are up at once, on the V1 runner that kvcached needs, and are asked in turn (with
`--after FILE` once that file is there). A growth is
of 1 GiB right after the last one, until 9 GiB are held: the first ones may come from kvcached's
reserve of mapped pages, and the median does not hide it. `no reserve` is kvcached without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from drive import Running, save

COUNTS = [1, 100, 1000, 10_000]
SYSTEMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "kvtide": ({"system": "kvtide"}, {}),
    "kvcached, default layout": ({"system": "kvcached"}, {}),
    "kvcached, default, no reserve": (
        {"system": "kvcached"},
        {"KVCACHED_PAGE_PREALLOC_ENABLED": "false"},
    ),
    "kvcached, per layer": ({"system": "kvcached", "contiguous": False}, {}),
}
WASTE = ("kvtide", "kvcached, default layout")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--after", type=Path)
    options = parser.parse_args()
    setup = {"model": "8b", "prefix_caching": False, "runner": 1}
    engines = {
        name: Running({**setup, **one, "utilization": 0.32 if name in WASTE else 0.24}, **environ)
        for name, (one, environ) in SYSTEMS.items()
    }
    results: dict[str, Any] = {}
    for name, engine in engines.items():
        results[name] = {"started": engine.wait_result()}
    while options.after is not None and not options.after.exists():
        time.sleep(0.5)
    for name, engine in engines.items():
        results[name]["growth"] = engine.ask("growth", 512, 9)
        print(name, results[name]["growth"], flush=True)
    for name in engines.keys() - set(WASTE):
        engines[name].close()
    for name in WASTE:
        results[name]["excess"] = engines[name].ask("excess", COUNTS)
        print(name, results[name]["excess"], flush=True)
    for name in WASTE:
        engines[name].close()
    save("against_kvcached", results)
    ours, theirs = (results[name]["growth"]["ms_median"] for name in WASTE)
    rows = zip(*(results[name]["excess"]["rows"] for name in WASTE), strict=True)
    less = all(a["excess_mib"] < b["excess_mib"] for a, b in rows)
    print(
        f"growth by 1 GiB: {ours:.2f} ms, kvcached {theirs:.2f} ms, per layer "
        f"{results['kvcached, per layer']['growth']['ms_median']:.2f} ms; "
        f"less beyond need in every row: {less}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
