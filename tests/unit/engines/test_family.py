"""The processes of a server at its end: the outermost is the last, and leaves nothing."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtide.engines import seats
from kvtide.ledger import Ledger

COMMON = """
import os, sys, time
from kvtide.device import open_device
from kvtide.engines import family, seats
from kvtide.settings import Settings
settings = Settings.from_environ()
info = open_device("host", host_total_bytes=settings.host_memory, host_uuid="test-family").info
family.join()
"""
OUTERMOST = (
    COMMON
    + """
import subprocess
seats._LEAVING_SECONDS = 0.3
seats.take_seats(settings, "engine", [info])
member = subprocess.Popen([sys.executable, "-c", os.environ["MEMBER"]], stdout=subprocess.PIPE)
assert member.stdout.readline() == b"ready\\n"
family.closing()
print(member.pid, flush=True)
"""
)
MEMBER = (
    COMMON
    + """
seat = seats.find_seat(settings, info)
account = seat.ledger.enroll(
    seat.instance, pool_name="kv", rank=0, blocks_total=4, block_bytes=1 << 21, sampler=lambda: 0
)
print("ready", flush=True)
"""
)
ENDINGS = {
    "never": "time.sleep(600)",
    "later, after a goodbye": "family._role.say_bye(); time.sleep(1.5); os._exit(0)",
    "in its own time": "time.sleep(0.1); account.close()",
}


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_nothing_is_left(tmp_path, outermost, ending):
    environ = {
        "PATH": "/usr/bin:/bin",
        "KVTIDE_DIR": str(tmp_path / "ledgers"),
        "KVTIDE_HOST_MEMORY": "64MiB",
        "MEMBER": MEMBER + ENDINGS[ending],
    }
    done = subprocess.run(
        [sys.executable, "-c", outermost], env=environ, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_alive(int(done.stdout))
    (path,) = Ledger.existing(tmp_path / "ledgers")
    with Ledger.read(path) as observer:
        assert observer.snapshot().instances == ()


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_outermost_ends_after_all_others_and_leaves_no_record(tmp_path, ending):
    assert_nothing_is_left(tmp_path, OUTERMOST, ending)


def test_who_came_and_was_not_heard_yet_is_outlived_too(tmp_path):
    deaf = COMMON.replace("family.join()", "family._Outermost._admit = lambda *_: time.sleep(600)")
    outermost = OUTERMOST.replace(COMMON, deaf + "family.join()\n")
    assert_nothing_is_left(tmp_path, outermost, "never")


def test_who_takes_it_down_waits_for_an_end_that_has_begun(monkeypatch):
    entered, done = threading.Event(), threading.Event()
    ends = []

    def outlive(_):
        if not entered.is_set():
            entered.set()
            done.wait(60)

    def leave(name):
        seats._leave()
        ends.append(name)

    monkeypatch.setattr(seats, "outlive_members", outlive)
    first = threading.Thread(target=leave, args=("first",))
    first.start()
    assert entered.wait(60)
    second = threading.Thread(target=leave, args=("second",))
    second.start()
    second.join(0.3)
    assert ends == []
    done.set()
    first.join()
    second.join()
    assert ends == ["first", "second"]
