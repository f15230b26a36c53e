"""A neighbour on a device's ledger that wishes for memory, takes it, holds it and gives it back.

python neighbour.py WISH_MIB HOLD_SECONDS            until stdin ends; then its figures
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

from kvtide.device import open_device
from kvtide.engines.seats import spec_of
from kvtide.ledger import Ledger, Refusal
from kvtide.settings import Settings
from kvtide.units import MIB


def main() -> int:
    wish, hold = int(sys.argv[1]) * MIB, float(sys.argv[2])
    settings = Settings.from_environ()
    device = open_device("cuda", host_total_bytes=0)
    ledger = Ledger.open(settings.dir, spec_of(device.info, settings))
    instance = ledger.register("neighbour", explicit=True)
    account = ledger.enroll(
        instance,
        pool_name="kv",
        rank=0,
        blocks_total=1,
        block_bytes=wish,
        sampler=device.free_bytes,
    )
    print("ready", flush=True)
    taken, waited, waits = 0, 0.0, []
    while not select.select([sys.stdin], [], [], 0)[0]:
        start = time.monotonic()
        answer = account.grant(wish)
        while isinstance(answer, Refusal):
            instance.wish(wish)
            if time.monotonic() - start > 10:
                break
            time.sleep(0.002)
            if answer.sample_is_stale:
                account.sample()
            answer = account.grant(wish)
        instance.wish(0)
        if isinstance(answer, Refusal):
            continue
        waited = time.monotonic() - start
        waits.append(round(waited * 1e3, 2))
        handle = device.create(wish)
        assert handle is not None, "granted, but the device has not so much"
        account.created(wish)
        taken += 1
        time.sleep(hold)
        account.released(wish)
        device.release(handle)
        account.refund(wish)
        time.sleep(hold)
    waits.sort()
    figures = {"taken": taken, "wait_ms_median": waits[len(waits) // 2], "wait_ms_max": waits[-1]}
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
