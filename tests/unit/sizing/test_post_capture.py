"""Sizing once graphs are captured: what may be held, and what must stay free."""

import pytest

from kvtide.sizing.capacity import activation_headroom, address_capacity
from kvtide.units import GIB, MIB


def test_addresses_cover_all_that_could_ever_be_mapped():
    capacity = address_capacity(140 * GIB, GIB, weights_bytes=15 * GIB)
    assert capacity == 124 * GIB
    # Whatever the instance measures later, it is at least its weights: the addresses suffice.
    own_bytes, headroom_bytes = 17 * GIB, GIB
    assert 140 * GIB - GIB - own_bytes - headroom_bytes <= capacity


def test_no_addresses_where_the_weights_fill_the_device():
    assert address_capacity(16 * GIB, GIB, weights_bytes=15 * GIB) == 0
    assert address_capacity(16 * GIB, GIB, weights_bytes=20 * GIB) == 0


@pytest.mark.parametrize(
    ("reserved", "allocated", "whole", "expected"),
    [
        (20 * GIB, 19 * GIB, False, 512 * MIB),  # 1 GiB of torch's reserve serves activations
        (20 * GIB, 20 * GIB, False, 1536 * MIB),
        (20 * GIB, 17 * GIB, False, 0),
        (20 * GIB, 17 * GIB, True, 1536 * MIB),
    ],
)
def test_headroom_is_what_activations_need_beyond_what_stays_reserved(
    reserved, allocated, whole, expected
):
    headroom = activation_headroom(
        1536 * MIB, reserved_bytes=reserved, allocated_bytes=allocated, whole=whole
    )
    assert headroom == expected
