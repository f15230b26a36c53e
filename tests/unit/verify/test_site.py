"""The devices of a case as its ledgers show them."""

import pytest

from kvtide.ledger import DeviceSpec, Ledger
from kvtide.units import MIB
from kvtide.verify.servers import Options, Server
from kvtide.verify.site import Model, Site, until

GRANULE = 2 * MIB


@pytest.fixture
def site(tmp_path):
    return Site(
        tmp_path / "work", tmp_path / "logs", backend="host", size_bytes=64 * MIB, devices=2
    )


@pytest.fixture
def ledgers(tmp_path, site):
    opened = [
        Ledger.open(
            tmp_path / "work" / "ledgers",
            DeviceSpec(uuid, "host", "host", 64 * MIB, 0, None, GRANULE),
        )
        for uuid in site.uuids
    ]
    yield opened
    for ledger in opened:
        ledger.close()


def test_without_a_ledger_there_is_nothing(site):
    assert site.snapshots() == []
    assert site.snapshot() is None
    assert site.instance("a") is None
    assert (site.charge("a"), site.free_bytes(), site.left_bytes()) == (0, 0, 0)


def test_the_device_is_the_one_that_most_share(site, ledgers):
    # The second by name, so that it is not the first by chance.
    first, second = sorted(ledgers, key=lambda ledger: ledger.path)
    kept = [ledger.register("a", explicit=True) for ledger in (first, second)]
    kept.append(second.register("b", explicit=True))
    assert [len(snapshot.instances) for snapshot in site.snapshots()] == [2, 1]
    assert site.snapshot().spec.uuid == second.spec.uuid
    assert len(site.instances("a")) == 2
    assert len(site.instances("b")) == 1
    site.set_limit("b", 8 * MIB)
    assert site.instance("b").limit_bytes == 8 * MIB


def test_a_server_has_the_sites_devices_only_under_kvtide(tmp_path, site):
    model = Model("m", tmp_path, "float32")
    plain = site.server(Server, model, "native", Options("float32", 128), native=True)
    elastic = site.server(Server, model, "a", Options("float32", 128))
    assert not [name for name in plain._environ if name.startswith("KVTIDE")]
    assert elastic._environ["KVTIDE_HOST_DEVICE"].split(",") == site.uuids
    assert elastic._environ["KVTIDE_NAME"] == "a"
    assert model.exact


def test_flags_that_somebody_gave_come_last(tmp_path, site):
    model = Model("m", tmp_path, "float32")
    for native in (True, False):
        options = Options("float32", 128, flags=("--dtype", "bfloat16"))
        command = site.server(Server, model, "a", options, native=native)._command
        assert command[-2:] == ["--dtype", "bfloat16"]


def test_waiting_says_how_long_it_took_or_that_it_was_in_vain():
    assert until(lambda: True, 10.0) is not None
    assert until(lambda: False, 0.01) is None
