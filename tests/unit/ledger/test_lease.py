import os

import pytest

from kvtide.ledger.lease import drop_lease, is_leased, take_lease


@pytest.fixture
def descriptions(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    fds = [os.open(path, os.O_RDWR) for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_lease_excludes_others_on_its_byte_alone(descriptions):
    ours, theirs = descriptions
    assert take_lease(ours, 4096)
    assert not take_lease(theirs, 4096)
    assert take_lease(theirs, 4097)
    drop_lease(ours, 4096)
    assert take_lease(theirs, 4096)


def test_others_see_a_lease_and_its_own_description_does_not(descriptions):
    ours, theirs = descriptions
    take_lease(ours, 100)
    assert is_leased(theirs, 100)
    assert not is_leased(ours, 100)
    assert not is_leased(theirs, 101)
    assert is_leased(theirs, 0, 0)


def test_closing_another_descriptor_of_the_file_drops_nothing(descriptions, tmp_path):
    ours, theirs = descriptions
    take_lease(ours, 100)
    os.close(os.open(tmp_path / "file", os.O_RDWR))
    assert is_leased(theirs, 100)


def test_a_lease_lies_beyond_the_end_of_the_file_as_well(descriptions):
    ours, theirs = descriptions
    assert take_lease(ours, 1 << 40)
    assert is_leased(theirs, 0, 0)


def test_the_kernel_drops_the_lease_with_the_last_descriptor(descriptions, tmp_path):
    _, theirs = descriptions
    fd = os.open(tmp_path / "file", os.O_RDWR)
    take_lease(fd, 7)
    twin = os.dup(fd)
    os.close(fd)
    assert is_leased(theirs, 7)
    os.close(twin)
    assert not is_leased(theirs, 7)
