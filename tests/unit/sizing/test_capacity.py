"""The stable capacity: against figures that engines printed, and independent of neighbours."""

import pytest

from kvtide.errors import UsageError
from kvtide.sizing.capacity import fraction_of, host_capacity, sglang_capacity, vllm_capacity
from kvtide.units import GIB


def test_vllm_a100_takes_weights_and_the_peak_off():
    total = round(36.33 * GIB / 0.92)
    capacity = vllm_capacity(
        total, 0.92, weights_bytes=round(8.61 * GIB), torch_peak_bytes=round(1.70 * GIB)
    )
    assert abs(capacity - 26.02 * GIB) < 0.005 * GIB


def test_sglang_t4_is_the_fraction_of_the_total():
    assert sglang_capacity(15_637_086_209, 0.9) == 14_073_377_588
    assert 14_073_377_588 // 12_288 == 1_145_294


def test_host_subtracts_nothing_and_an_explicit_size_wins():
    assert host_capacity(8 * GIB, 0.5) == 4 * GIB
    assert host_capacity(8 * GIB, 0.5, explicit_bytes=GIB) == GIB
    assert sglang_capacity(8 * GIB, 0.5, explicit_bytes=GIB) == GIB
    assert vllm_capacity(1, 0.5, weights_bytes=9, torch_peak_bytes=9, explicit_bytes=GIB) == GIB


def test_a_decimal_fraction_is_taken_as_written():
    assert fraction_of(10, 0.7) == 7
    assert fraction_of(1000, 0.29) == 290  # 0.29 * 1000 is 289.99... in floats
    assert fraction_of(7, 1) == 7


def test_costs_above_the_share_leave_nothing():
    assert vllm_capacity(GIB, 0.5, weights_bytes=GIB, torch_peak_bytes=0) == 0


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_a_fraction_outside_is_refused(fraction):
    with pytest.raises(UsageError, match="fraction"):
        fraction_of(GIB, fraction)
