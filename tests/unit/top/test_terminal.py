"""`kvtide top` in a terminal of its own: keys change the ledger, and it leaves cleanly."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from kvtide.units import MIB
from observed_world import World


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "ledgers")
    yield made
    made.close()


class Terminal:
    def __init__(self, directory):
        self.fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from kvtide.cli import main; main()", "top"],
            env=os.environ | {"KVTIDE_DIR": str(directory), "TERM": "xterm"},
            stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def until(self, text):
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown[-2000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode(errors="ignore")
                except OSError:  # it has ended
                    raise AssertionError(self.shown) from None

    def press(self, keys):
        os.write(self.fd, keys.encode())


def test_terms_are_set_by_keys(world):
    chat = world.engine("chat")
    chat.hold(10, 20, 2)
    terminal = Terminal(world.directory)
    terminal.until("chat")
    terminal.press("l96MiB\r")
    terminal.until("the limit of chat is 96MiB now")
    assert chat.instance.limit_bytes == 96 * MIB
    terminal.press("l1KiB of nonsense\r")
    terminal.until("is not a size")
    terminal.press("m32MiB\r")
    terminal.until("the min of chat is 32MiB now")
    terminal.press("p-3\r")
    terminal.until("the priority of chat is -3 now")
    terminal.press("phigh\r")
    terminal.until("a priority is a number")
    terminal.press("h16MiB\r")
    terminal.until("the headroom of chat is 16MiB now")
    (view,) = world.ledger.snapshot().instances
    assert view.terms == (96 * MIB, 32 * MIB, -3, 16 * MIB)
    terminal.press("q")
    assert terminal.process.wait(60) == 0
    os.close(terminal.fd)
