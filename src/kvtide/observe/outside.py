"""What of a device all but KV caches take now, by its kernel or driver; without a context."""

from __future__ import annotations

from kvtide.device.census import holdings
from kvtide.ledger import Snapshot

__all__ = ["outside_now_bytes"]


def outside_now_bytes(snapshot: Snapshot) -> int | None:
    """Bytes that no pool of a ledger holds; None where that cannot be known.

    That is where NVML is missing, or does not know the device (a MIG slice).
    """
    spec = snapshot.spec
    pools = [pool for instance in snapshot.instances for pool in instance.pools if pool.live]
    if spec.backend == "host":
        pids = {pool.pid for pool in pools}
        held = holdings(spec.uuid)
        known = {holding.inode for holding in held if holding.pid in pids}
        return sum({h.inode: h.size_bytes for h in held if h.inode not in known}.values())
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(spec.uuid))
        return max(0, int(memory.used) - sum(pool.mapped_bytes for pool in pools))
    except pynvml.NVMLError:
        return None
