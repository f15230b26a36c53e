"""What the outermost process of a server leaves behind in the ledgers at its end."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvtide.device.host import HostDevice
from kvtide.engines import seats
from kvtide.ledger import Ledger
from kvtide.settings import Settings
from kvtide.units import MIB

TOTAL_BYTES = 64 * MIB


def test_what_its_workers_held_is_in_the_budget_again(tmp_path: Path) -> None:
    """A worker that was ended has closed nothing: its charge fell with the budget."""
    device = HostDevice(TOTAL_BYTES, uuid=f"seats-{os.getpid()}")
    spec = seats.spec_of(device.info, Settings(dir=tmp_path))
    device.close()
    ledger = Ledger.open(tmp_path, spec)
    instance = ledger.register("a", explicit=True)
    parent_reads, child_writes = os.pipe()
    child = os.fork()
    if child == 0:
        mine = Ledger.attach(ledger.path)
        held = HostDevice(TOTAL_BYTES, uuid=spec.uuid)
        account = mine.enroll(
            mine.instance(instance.key),
            pool_name="kv",
            rank=0,
            blocks_total=8,
            block_bytes=2 * MIB,
            sampler=held.free_bytes,
        )
        account.grant(32 * MIB)
        held.create(32 * MIB)
        account.created(32 * MIB)
        os.write(child_writes, b"x")
        time.sleep(60)
        os._exit(1)
    os.read(parent_reads, 1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    seats._give_up(ledger, instance, time.monotonic() + 10)
    with Ledger.read(ledger.path) as observer:
        found = observer.snapshot()
    assert found.instances == ()
    assert found.budget_bytes == TOTAL_BYTES
