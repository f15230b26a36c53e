"""What a process counts is what others read, at any moment, and files of the dead are removed."""

import errno
import random
import subprocess
import sys

import pytest

from kvtide.ledger import Ledger
from kvtide.observe import tally as t
from kvtide.observe.tallies import leftovers, read_tally, sweep
from kvtide.observe.tally import Cause, Kind, Owner, Tally, Verb, tallies_of
from ledger_world import enroll, spec

OWNER = Owner("engine", 3, 5)


@pytest.fixture
def ledger_path(tmp_path):
    return tmp_path / "host.ledger"


@pytest.fixture
def tally(ledger_path):
    made = Tally(ledger_path, OWNER)
    yield made
    made.close()


def test_counts_and_events_are_read_as_they_were_written(tally):
    tally.note(Kind.GROW, Cause.NEED, 10)
    tally.note(Kind.RESUME, Cause.START, 0, 7)
    tally.count(Kind.EVICT, Cause.ALLOCATION, 5)
    tally.count(Kind.EVICT, Cause.ALLOCATION, 6)
    reading = read_tally(tally.path)
    assert reading.counts == {
        ("grow", "need"): (1, 10),
        ("resume", "start"): (1, 0),
        ("evict", "allocation"): (2, 11),
    }
    assert [e[2:] for e in reading.events] == [("grow", "need", 10, 0), ("resume", "start", 0, 7)]
    assert reading.events[0].time_ns <= reading.events[1].time_ns
    assert (reading.head, reading.lost) == (2, 0)


def test_names_fit_the_tables():
    for names, limit in ((t.KIND_NAMES, t.KINDS), (t.CAUSE_NAMES, t.CAUSES)):
        assert len(names) <= limit
        assert len(set(names)) == len(names)
    assert len(t.VERB_NAMES) <= t.HISTOGRAMS
    for of, names in ((Kind, t.KIND_NAMES), (Cause, t.CAUSE_NAMES), (Verb, t.VERB_NAMES)):
        numbers = {k.lower(): v for k, v in vars(of).items() if k.isupper()}
        assert [numbers[name] for name in names] == list(range(len(names)))


@pytest.mark.parametrize(
    ("took_ns", "bucket"),
    [(0, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (4000, 2), (10**18, t.BUCKETS)],
)
def test_a_duration_is_in_the_bucket_whose_bound_it_does_not_exceed(tally, took_ns, bucket):
    tally.time(Verb.MAP, took_ns)
    histogram = read_tally(tally.path).times["map"]
    assert histogram.sum_ns == took_ns
    assert [i for i, n in enumerate(histogram.buckets) if n] == [bucket]
    assert histogram.total == 1


def test_a_reader_that_is_late_knows_what_it_lost(tally):
    for number in range(t.EVENTS + 10):
        tally.note(Kind.GROW, Cause.NEED, number)
    reading = read_tally(tally.path, after=2)
    # One place less, as the writer might be about to overwrite the oldest.
    assert reading.lost == 9
    assert [e.size_bytes for e in reading.events] == list(range(11, t.EVENTS + 10))
    assert read_tally(tally.path, after=reading.head).events == ()


def test_events_read_while_a_process_writes_are_never_torn(ledger_path):
    code = f"""
import sys
from pathlib import Path
from kvtide.observe.tally import Tally, Owner
tally = Tally(Path({str(ledger_path)!r}), Owner("engine", 3, 5))
print("ready", flush=True)
number = 0
while True:
    number += 1
    tally.note(number % 9, number % 16, number, -number)
"""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "ready\n"
        after, seen, pick = 0, 0, random.Random(1)
        while seen < 20_000:
            reading = read_tally(OWNER.path(ledger_path), after)
            numbers = [e.number for e in reading.events]
            assert numbers == list(range(reading.head - len(numbers) + 1, reading.head + 1))
            for e in pick.sample(reading.events, min(50, len(reading.events))):
                assert (e.size_bytes, e.detail) == (e.number, -e.number)
                assert e.kind == t.KIND_NAMES[e.number % 9]
            after, seen = reading.head, seen + len(numbers) + 1
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


def test_a_tally_goes_with_its_owner_and_later_counts_do_no_harm(tally, ledger_path):
    path = tally.path
    assert tallies_of(ledger_path) == {OWNER: path}
    assert path.stat().st_mode & 0o777 == 0o600
    tally.close()
    assert not path.exists()
    tally.note(Kind.GROW, Cause.NEED, 1)
    tally.time(Verb.MAP, 1)


def test_where_there_is_no_room_it_counts_unseen(ledger_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    tally = Tally(ledger_path, OWNER)
    assert tallies_of(ledger_path) == {}
    assert "No space left" in caplog.text
    tally.note(Kind.GROW, Cause.NEED, 1)
    tally.close()


@pytest.mark.parametrize("content", [b"", b"nonsense", bytes(t.FILE_BYTES)])
def test_what_is_no_tally_is_not_read(tmp_path, content):
    path = tmp_path / "host.3.5.engine.tally"
    path.write_bytes(content)
    assert read_tally(path) is None
    assert read_tally(tmp_path / "none") is None


def test_tallies_of_the_dead_are_found_and_swept(tmp_path):
    ledger = Ledger.open(tmp_path / "ledgers", spec())
    instance, account = enroll(ledger, "a")
    mine = [
        Tally(ledger.path, Owner.of_key("engine", instance.key)),
        Tally(ledger.path, Owner.of_key("rank", account.key)),
    ]
    dead = Tally(ledger.path, Owner("rank", 9, 1))
    listed = tallies_of(ledger.path)
    assert leftovers(ledger.snapshot(), listed) == [dead.path]
    assert sweep(listed, ledger.snapshot()) == 1
    assert set(tallies_of(ledger.path).values()) == {tally.path for tally in mine}
    for tally in [*mine, dead]:
        tally.close()
    account.close()
    instance.close()
    ledger.close()
