"""Requests and starts that can never be held: what is in the way, and what can be done."""

import warnings
from types import SimpleNamespace

import pytest

from kvtide.errors import NeverFitsError
from kvtide.ledger import Ledger
from kvtide.pool import Geometry, Strip
from kvtide.ranks.seat import Seat
from kvtide.units import MIB
from ledger_world import enroll, spec

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtide.engines.vllm import fitting

pytestmark = pytest.mark.torch

GRANULE = 2 * MIB
GEOMETRY = Geometry.of(256, [Strip(0, GRANULE, GRANULE)], GRANULE)


@pytest.fixture
def seated(tmp_path):
    ledgers = []

    def seat(limit_bytes=None, **changes):
        ledgers.append(Ledger.open(tmp_path / f"kv-{len(ledgers)}", spec(**changes)))
        instance, account = enroll(ledgers[-1], "a", limit_bytes=limit_bytes)
        account.grant(8 * MIB)
        return Seat(ledgers[-1], instance)

    yield seat
    for ledger in ledgers:
        ledger.close()


def why_never(seat, blocks):
    member = SimpleNamespace(device_uuid="host", shape=0)
    memory = SimpleNamespace(
        pool=SimpleNamespace(shapes=[SimpleNamespace(geometry=GEOMETRY)]),
        ranks=SimpleNamespace(members=[member]),
        seats={"host": seat},
    )
    return fitting.why_never(memory, blocks)


CASES = {
    "limit": (
        {"limit_bytes": 128 * MIB},
        "the limit of a (KVTIDE_LIMIT, kvtide limit) is 128MiB",
        "make it at least 202MiB",
    ),
    "budget": (
        {"budget_cap_bytes": 128 * MIB},
        "the budget of the device (KVTIDE_BUDGET) is 128MiB",
        "make it at least 202MiB, the same for all engines of the device",
    ),
    "host memory": (
        {"total_bytes": 160 * MIB, "margin_bytes": 32 * MIB},
        "the device host less its margin (KVTIDE_MARGIN) is 128MiB",
        "make KVTIDE_HOST_MEMORY at least 234MiB, the same for all engines of the device",
    ),
    "margin": (
        {"backend": "cuda", "margin_bytes": 128 * MIB},
        "the device host less its margin (KVTIDE_MARGIN) is 128MiB",
        "make the margin at most 54MiB, the same for all engines of the device",
    ),
    "device": (
        {"backend": "cuda", "total_bytes": 160 * MIB, "margin_bytes": 32 * MIB},
        "the device host less its margin (KVTIDE_MARGIN) is 128MiB",
        "use a larger device, or more devices",
    ),
    "a limit on a device that is too small": (
        {"limit_bytes": 64 * MIB, "budget_cap_bytes": 128 * MIB},
        "the budget of the device (KVTIDE_BUDGET) is 128MiB",
        "make it at least 202MiB",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_that_never_fits_is_told_what_can_be_done(seated, case):
    changes, in_the_way, remedy = CASES[case]
    seat = seated(**changes)
    assert why_never(seat, 20) is None
    said = why_never(seat, 100)
    assert said.startswith(f"202MiB of host, which can never be had: {in_the_way}")
    assert f"(held are a 8MiB): {remedy}" in said
    assert said.endswith(", or send shorter requests (--max-model-len bounds them)")


@pytest.mark.parametrize("case", CASES)
def test_a_start_whose_longest_request_never_fits_is_told_the_same(seated, monkeypatch, case):
    changes, in_the_way, remedy = CASES[case]
    monkeypatch.setattr(fitting, "blocks_of_longest", lambda *_: 100)
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=1600))
    with pytest.raises(NeverFitsError) as refused:
        fitting.check_longest(config, None, GEOMETRY, seated(**changes))
    assert f"and {in_the_way}: {remedy}" in str(refused.value)
    assert str(refused.value).endswith(", or --max-model-len smaller")
