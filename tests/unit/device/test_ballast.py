"""Ballast: host memory that no ledger knows of."""

import os
import subprocess
import sys
import time

from kvtide.device.census import used_bytes
from kvtide.units import MIB


def start(*arguments: str, **streams) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvtide.device.ballast", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **streams
    )


def test_ballast_takes_and_gives_back_while_it_runs():
    uuid = f"ballast-{os.getpid()}-{time.monotonic_ns()}"
    process = start("6MiB", "--total", "32MiB", "--uuid", uuid, stdin=subprocess.PIPE)
    assert process.stdout.readline() == f"held {6 * MIB}\n"
    assert used_bytes(uuid) == 6 * MIB
    for line, held in (("20MiB", 20), ("3MiB", 4), ("1GiB", 32), ("0", 0), ("2MiB", 2)):
        process.stdin.write(line + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"held {held * MIB}\n"
        assert used_bytes(uuid) == held * MIB
    process.stdin.write("much\n")
    process.stdin.flush()
    assert "'much" in process.stderr.readline()
    process.communicate()
    assert process.returncode == 0
    assert used_bytes(uuid) == 0


def test_ballast_without_a_pipe_holds_until_it_is_killed():
    uuid = f"ballast-{os.getpid()}-{time.monotonic_ns()}"
    process = start("2MiB", "--uuid", uuid, stdin=subprocess.DEVNULL)
    assert process.stdout.readline() == f"held {2 * MIB}\n"
    assert used_bytes(uuid) == 2 * MIB
    process.terminate()
    process.communicate()
    assert used_bytes(uuid) == 0


def test_ballast_of_no_size_is_a_usage_error():
    process = start("lots", stdin=subprocess.DEVNULL)
    _, complaint = process.communicate()
    assert process.returncode == 2
    assert (
        complaint == "ballast: 'lots' is not a size; write for example 12GiB, 512MiB or 1048576\n"
    )
