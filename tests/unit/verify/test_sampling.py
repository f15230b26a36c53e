"""The sampler sees what a real ledger says, from the moment that there is one."""

import time

import pytest

from kvtide.errors import LedgerError
from kvtide.ledger import DeviceSpec, Ledger
from kvtide.units import MIB
from kvtide.verify.picture import draw_memory
from kvtide.verify.sampling import MemorySampler, Sample, peak

SPEC = DeviceSpec("host-sampler-test", "host", "host memory", 64 * MIB, 0, None, 2 * MIB)


def _wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing came within 60 s"
        time.sleep(0.005)


def test_samples_follow_the_ledger(tmp_path):
    with MemorySampler(tmp_path / "ledgers", kernel_every=2) as sampler:
        assert sampler.samples == []
        ledger = Ledger.open(tmp_path / "ledgers", SPEC)
        instance = ledger.register("a", explicit=True)
        account = ledger.enroll(
            instance,
            pool_name="main",
            rank=0,
            blocks_total=10,
            block_bytes=MIB,
            sampler=lambda: 64 * MIB,
        )
        account.grant(6 * MIB)
        _wait(lambda: peak(list(sampler.samples), "a") == 6 * MIB)
        seen = len(sampler.samples)
        _wait(lambda: len(sampler.samples) > seen + 2)
    last = sampler.samples[-1]
    assert last.charged_bytes == {"a": 6 * MIB}
    assert last.total_charged_bytes == 6 * MIB
    assert last.budget_bytes == 64 * MIB
    kernel = [sample.kernel_bytes for sample in sampler.samples[-2:]]
    assert sorted(kernel, key=str) == [0, None]
    assert [s.seconds for s in sampler.samples] == sorted(s.seconds for s in sampler.samples)
    account.close()
    instance.close()
    ledger.close()


def test_a_ledger_that_stays_unreadable_is_told(tmp_path):
    (tmp_path / "ledgers").mkdir(mode=0o700)
    (tmp_path / "ledgers" / "host.ledger").write_bytes(b"nonsense")
    sampler = MemorySampler(tmp_path / "ledgers")

    def watch():
        with sampler:
            _wait(lambda: sampler._failure is not None)

    with pytest.raises(LedgerError, match="cannot be read"):
        watch()


def test_no_ledger_is_no_sample(tmp_path):
    with MemorySampler(tmp_path / "none") as sampler:
        pass
    assert sampler.samples == []
    assert peak(sampler.samples) == 0


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    samples = [
        Sample(i / 10, 64 * MIB, {"a": i * MIB, "b": MIB}, None, 64 * MIB) for i in range(40)
    ]
    draw_memory(samples, ("a", "b"), [(0.5, "a grows"), (2.0, "rest")], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
