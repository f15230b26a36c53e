"""Settings: every variable is checked, and what is wrong is quoted."""

from __future__ import annotations

import pytest

from kvtide.errors import SettingsError
from kvtide.settings import Settings


def read(**variables: str) -> Settings:
    return Settings.from_environ(variables)


def test_the_host_device_has_a_plain_name():
    assert read().host_device == ("host",)
    assert read(KVTIDE_HOST_DEVICE="run-7.b").host_device == ("run-7.b",)
    assert read(KVTIDE_HOST_DEVICE="a,b").host_device == ("a", "b")
    for name in ("../x", "a b", ".hidden", "a/b", "x" * 65, "-x"):
        with pytest.raises(SettingsError, match=r"KVTIDE_HOST_DEVICE=.*plain name"):
            read(KVTIDE_HOST_DEVICE=name)


def test_what_steers_an_instance_is_read_and_checked():
    given = read(KVTIDE_MIN="1GiB", KVTIDE_PRIORITY="-5", KVTIDE_HEADROOM="64MiB")
    assert (given.min, given.priority, given.headroom) == (1 << 30, -5, 64 << 20)
    assert (read().min, read().priority, read().headroom) == (0, 0, 0)
    for text in ("high", "1.5", "1001", "-1001", "--1", "٣"):
        with pytest.raises(SettingsError, match=r"KVTIDE_PRIORITY=.*whole number"):
            read(KVTIDE_PRIORITY=text)
    with pytest.raises(SettingsError, match=r"KVTIDE_MIN=2GiB is above KVTIDE_LIMIT=1GiB"):
        read(KVTIDE_MIN="2GiB", KVTIDE_LIMIT="1GiB")
    with pytest.raises(SettingsError, match=r"KVTIDE_MIN=2GiB is above KVTIDE_BUDGET=1GiB"):
        read(KVTIDE_MIN="2GiB", KVTIDE_BUDGET="1GiB")
