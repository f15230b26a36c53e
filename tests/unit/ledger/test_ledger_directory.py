import os

import pytest

from kvtide.errors import LedgerError
from kvtide.ledger import Ledger
from ledger_world import spec


def refusal(directory):
    with pytest.raises(LedgerError) as caught:
        Ledger.open(directory, spec())
    return str(caught.value)


def test_the_directory_and_the_file_are_made_private(tmp_path):
    os.umask(0)
    try:
        ledger = Ledger.open(tmp_path / "kv", spec())
    finally:
        os.umask(0o022)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert ledger.path.stat().st_mode & 0o777 == 0o600
    assert Ledger.existing(tmp_path / "kv") == [ledger.path]
    ledger.close()


def test_no_directory_has_no_ledgers(tmp_path):
    assert Ledger.existing(tmp_path / "nowhere") == []


@pytest.mark.parametrize("mode", [0o707, 0o770, 0o750, 0o777, 0o701])
def test_a_directory_open_to_others_is_refused_with_the_remedy(tmp_path, mode):
    directory = tmp_path / "kv"
    directory.mkdir()
    directory.chmod(mode)
    assert f"chmod 700 {directory}" in refusal(directory)
    with pytest.raises(LedgerError):
        Ledger.existing(directory)


def test_a_link_is_refused_though_it_leads_to_a_private_directory(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    assert "symbolic link" in refusal(tmp_path / "kv")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "kv").write_text("")
    assert "not a directory" in refusal(tmp_path / "kv")


def test_a_directory_that_cannot_be_made_names_the_setting(tmp_path):
    assert "KVTIDE_DIR" in refusal(tmp_path / "no" / "such")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_foreign_owner_is_refused_of_directory_and_file(tmp_path):
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o700)
    Ledger.open(directory, spec()).close()
    os.chown(directory / "host.ledger", 12345, 12345)
    assert "user 12345" in refusal(directory)
    os.chown(directory, 12345, 12345)
    assert "user 12345" in refusal(directory)


@pytest.mark.parametrize("uuid", ["", "../x", "a/b", "-a", "a" * 65, "a\n"])
def test_a_uuid_that_is_no_file_name_is_refused(tmp_path, uuid):
    with pytest.raises(LedgerError, match="UUID"):
        Ledger.open(tmp_path, spec(uuid=uuid))
