"""Transactions: whole or not at all."""

import pytest

from kvtide.memory.transaction import Transaction


def test_leaving_without_commit_undoes_newest_first():
    log = []
    with Transaction() as change:
        change.undo_by(log.append, 1)
        change.undo_by(log.append, 2)
    assert log == [2, 1]


def test_an_exception_undoes_and_goes_on():
    log = []

    def fail_half_way():
        with Transaction() as change:
            change.undo_by(log.append, 1)
            raise KeyError("step")

    with pytest.raises(KeyError, match="step"):
        fail_half_way()
    assert log == [1]


def test_committed_steps_stay_and_later_ones_are_undone():
    log = []
    with Transaction() as change:
        change.undo_by(log.append, 1)
        change.commit()
        change.undo_by(log.append, 2)
    assert log == [2]


def test_an_undo_that_fails_keeps_no_older_one_from_running():
    log = []

    def fail(what):
        raise ValueError(what)

    def fail_all_the_way():
        with Transaction() as change:
            change.undo_by(log.append, 1)
            change.undo_by(fail, "oldest")
            change.undo_by(log.append, 2)
            change.undo_by(fail, "newest")
            raise KeyError("step")

    with pytest.raises(ValueError, match="newest") as caught:
        fail_all_the_way()
    assert log == [2, 1]
    assert isinstance(caught.value.__context__, KeyError)
