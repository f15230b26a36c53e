"""The growth benchmark on the host device, small: its figures are of what it says."""

from kvtide.bench.growth import measure_excess, measure_growth, measure_single
from kvtide.device.host import HostDevice
from kvtide.units import MIB


def test_growth_excess_and_single_blocks_on_the_host():
    device = HostDevice(256 * MIB, uuid="bench-test")
    try:
        growth = measure_growth(
            device, layers=2, block_bytes=2 * MIB, grow_bytes=16 * MIB, repeats=2
        )
        assert growth["grow_mib"] == 16
        assert growth["extents"] >= 2
        assert growth["ratio"]["min"] > 0
        rows = measure_excess(device, block_bytes=2 * MIB, counts=[1, 4])
        assert [row["blocks"] for row in rows[:2]] == [1, 4]
        assert all(row["excess_mib"] >= 0 for row in rows)
        assert rows[-1]["excess_mib"] == 0
        assert measure_single(device, block_bytes=2 * MIB, blocks=16)["blocks"] == 16
        assert device.held_bytes == 0
    finally:
        device.close()
