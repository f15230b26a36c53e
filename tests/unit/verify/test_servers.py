"""Servers are started, watched and stopped with all their processes; here a stand-in for vLLM."""

import os
import signal
import time

import pytest

from kvtide.verify.servers import Server, ServerError, session_pids

FAKE = """
import http.server, os, signal, subprocess, sys, time

mode = sys.argv[sys.argv.index("serve") + 1].rpartition("/")[2]
print("mode", mode, "KVTIDE" in os.environ, os.environ["OMP_NUM_THREADS"], flush=True)
if mode == "broken":
    sys.exit("no such model")
child = "import time, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)"
worker = subprocess.Popen([sys.executable, "-c", child])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
try:
    server.serve_forever()
except KeyboardInterrupt:
    if mode != "stubborn":
        worker.kill()
        worker.wait()
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(FAKE)
    monkeypatch.setenv("KVTIDE", "1")

    def make(mode):
        environ = {"PYTHONPATH": str(tmp_path / "site")}
        return Server(tmp_path / mode, log=tmp_path / "log", environ=environ)

    return make


def test_a_server_and_its_child_come_and_go(make):
    with make("good") as server:
        server.wait_ready(60)
        assert server.healthy()
        pids = server.pids()
        assert server.pid in pids
        assert len(pids) == 2
    assert server.killed == []
    assert server.exit_status() == 0
    assert session_pids(server.pid) == []
    # Nothing of this process's own kvtide settings reaches a native server.
    assert "mode good False 1" in server.log_tail()


def test_what_does_not_end_is_killed(make):
    server = make("stubborn").start().wait_ready(60)
    server.stop(timeout_seconds=0.5)
    assert len(server.killed) == 1
    deadline = time.monotonic() + 60
    while session_pids(server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_is_known_after_its_parent_was_killed(make):
    server = make("good").start().wait_ready(60)
    os.kill(server.pid, signal.SIGKILL)
    assert server.exit_status() is None or server.exit_status() == -signal.SIGKILL
    server.stop(timeout_seconds=0.5)
    assert len(server.killed) == 1


def test_a_server_that_ends_at_once_shows_its_log(make):
    server = make("broken")
    with server, pytest.raises(ServerError, match="ended with status 1") as raised:
        server.wait_ready(60)
    assert "no such model" in str(raised.value)


def test_a_role_that_is_not_there_is_an_error(make):
    with make("good") as server:
        server.wait_ready(60)
        with pytest.raises(ServerError, match="0 processes named 'Worker'"):
            server.role_pid("Worker")


def test_stop_before_start_does_nothing(make):
    make("good").stop()
