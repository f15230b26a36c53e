"""The JSON of `kvtide status` is what was promised, from a real ledger."""

import msgspec
import pytest

from kvtide.errors import LedgerError
from kvtide.ledger import DeviceSpec, Granted, Ledger, PoolFigures, State
from kvtide.observe.snapshot import observe
from kvtide.units import MIB

SPEC = DeviceSpec(
    uuid="host",
    backend="host",
    name="host memory",
    total_bytes=256 * MIB,
    margin_bytes=16 * MIB,
    budget_cap_bytes=None,
    granularity_bytes=2 * MIB,
)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "ledgers"


def test_no_directory_is_no_device(directory):
    assert msgspec.json.encode(observe(directory)) == b'{"devices":[]}'


def test_one_instance_with_a_pool(directory):
    ledger = Ledger.open(directory, SPEC)
    instance = ledger.register("chat", limit_bytes=64 * MIB, explicit=True)
    account = ledger.enroll(
        instance,
        pool_name="main",
        rank=0,
        blocks_total=500,
        block_bytes=MIB,
        sampler=lambda: 256 * MIB,
    )
    assert account.grant(8 * MIB) == Granted(8 * MIB)
    account.created(6 * MIB)
    account.publish(PoolFigures(6, 2, 3, 2, 4 * MIB))
    instance.set_state(State.RUNNING)
    found = msgspec.json.decode(msgspec.json.encode(observe(directory)))
    (pool,) = found["devices"][0]["instances"][0]["pools"]
    assert pool.pop("pid") > 0
    assert pool.pop("key") == account.key
    assert found["devices"][0]["instances"][0].pop("pid") > 0
    assert found == {
        "devices": [
            {
                "device": "host",
                "backend": "host",
                "total_bytes": 256 * MIB,
                "margin_bytes": 16 * MIB,
                "budget_bytes": 240 * MIB,
                "charged_bytes": 8 * MIB,
                "free_bytes": 232 * MIB,
                "name": "host memory",
                "lendable_bytes": 4 * MIB,
                "outside_bytes": 0,
                "instances": [
                    {
                        "name": "chat",
                        "state": "running",
                        "charged_bytes": 8 * MIB,
                        "mapped_bytes": 6 * MIB,
                        "limit_bytes": 64 * MIB,
                        "limit_revision": instance.limit_revision,
                        "key": instance.key,
                        "used_bytes": 2 * MIB,
                        "cached_bytes": 3 * MIB,
                        "idle_bytes": MIB,
                        "quarantined_bytes": 0,
                        "pinned_bytes": 0,
                        "waiting_bytes": 0,
                        "min_bytes": 0,
                        "backed_min_bytes": 0,
                        "priority": 0,
                        "headroom_bytes": 0,
                        "headroom_taken_bytes": 0,
                        "non_kv_bytes": 0,
                        "loading_bytes": 0,
                        "silent": False,
                        "pools": [
                            {
                                "name": "main",
                                "rank": 0,
                                "block_bytes": MIB,
                                "blocks_total": 500,
                                "blocks_mapped": 6,
                                "blocks_used": 2,
                                "blocks_cached": 3,
                                "extents": 2,
                            }
                        ],
                    }
                ],
            }
        ]
    }
    account.close()
    instance.close()
    ledger.close()


def test_a_ledger_cut_short_is_one_clear_error(directory):
    ledger = Ledger.open(directory, SPEC)
    ledger.close()
    path = directory / "host.ledger"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LedgerError, match=r"host\.ledger cannot be read"):
        observe(directory)
