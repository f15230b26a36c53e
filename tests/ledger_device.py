"""A device of tests that real processes share: who holds how much is a word a process in a file.

Unlike a ledger it knows the truth, and refuses what it does not have. Run as a program it is one
process that takes memory and gives it back at random until it is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from kvtide.ledger import Granted, Ledger, PoolFigures
from kvtide.units import MIB

HOLDERS = 64
FAILED = HOLDERS  # words after the holders' own
STEPS = HOLDERS + 1  # and a counter of steps a holder


class SharedDevice:
    def __init__(self, path: Path, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        if not path.exists():
            path.write_bytes(bytes(4096))
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 4096)
        self.words = memoryview(self._map).cast("q")

    @contextmanager
    def _locked(self):
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def held(self) -> list[int]:
        return self.words[:HOLDERS].tolist()

    def free_bytes(self) -> int:
        with self._locked():
            return self.total_bytes - sum(self.held())

    def create(self, holder: int, size_bytes: int) -> bool:
        with self._locked():
            if sum(self.held()) + size_bytes > self.total_bytes:
                self.words[FAILED] += 1
                return False
            self.words[holder] += size_bytes
            return True

    def release(self, holder: int, size_bytes: int) -> None:
        with self._locked():
            self.words[holder] -= size_bytes

    def close(self) -> None:
        self.words.release()
        self._map.close()
        self._file.close()


def main(directory: Path, device_path: Path, holder: int, seed: int) -> None:
    from ledger_world import TOTAL, spec

    dice = random.Random(seed)
    device = SharedDevice(device_path, TOTAL)
    ledger = Ledger.open(directory, spec())
    instance = ledger.register(f"m{holder}", explicit=True)
    account = ledger.enroll(
        instance,
        pool_name="kv",
        rank=0,
        blocks_total=1,
        block_bytes=1,
        sampler=device.free_bytes,
    )
    print(account.key, flush=True)
    held = granted = 0
    for step in range(10**9):
        device.words[STEPS + holder] = step
        time.sleep(0.0002)  # leaves the machine to others, too
        act = dice.randrange(6)
        size = dice.randrange(1, 24) * MIB
        if act <= 1:
            answer = account.grant(size)
            if isinstance(answer, Granted):
                granted += size
            elif answer.sample_is_stale:
                account.sample()
            elif answer.reason == "retired":
                device.words[FAILED] += 1
        elif act == 2 and granted:
            size = min(size, granted)
            if device.create(holder, size):
                account.created(size)
                held, granted = held + size, granted - size
        elif act == 3 and held:
            size = min(size, held)
            account.released(size)
            device.release(holder, size)
            account.refund(size)
            held -= size
        elif act == 4 and granted:
            account.refund(granted)
            granted = 0
        elif act == 5:
            account.publish(PoolFigures(1, 1, 0, 1, held))
            dice.choice([account.sample, ledger.retire_dead, ledger.snapshot, time.monotonic])()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
