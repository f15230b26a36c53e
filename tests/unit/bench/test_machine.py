"""Processor time of processes, as their machine counts it."""

import os
import subprocess
import sys

from kvtide.bench.machine import cpu_seconds


def test_work_is_counted_and_the_dead_count_nothing():
    body = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert 0.25 <= cpu_seconds([process.pid]) < 30
        both = cpu_seconds([process.pid, os.getpid()])
        assert both > cpu_seconds([process.pid])
        process.communicate("\n")
    assert cpu_seconds([process.pid]) == 0
