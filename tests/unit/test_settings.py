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
