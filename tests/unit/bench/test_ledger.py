"""The ledger's benchmark: a floor beside every figure, and a crowd that loses nothing."""

from kvtide.bench import ledger
from kvtide.device.host import HostDevice
from kvtide.units import MIB


def test_every_figure_has_its_floor_and_nothing_is_lost(monkeypatch):
    for name, value in (("_PAIRS", 3), ("_REPEATS", 2), ("_SAMPLES", 2), ("_SECONDS", 0.1)):
        monkeypatch.setattr(ledger, name, value)
    found = ledger.measure_ledger(HostDevice(16 * MIB, uuid="bench-ledger-test"))
    assert found["floor"]["wall_us_median"] > 0
    assert set(found["sample"]) == {"floor", "product"}
    assert all(len(case["raw"]["cpu_us"]) == 2 for case in found["uncontended"].values())
    crowd = found["contended"]
    assert crowd["pairs_per_second"] > 0
    assert crowd["lost_bytes"] == 0
    assert len(crowd["raw"]) == crowd["processes"]
