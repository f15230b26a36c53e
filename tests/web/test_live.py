"""Two real vLLM servers under the page, metrics, top and a recording, all at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from served import Served
from test_page import cell, console_errors, edit, hue, row, serious, until, width

from kvtide.ledger import Ledger
from kvtide.units import MIB
from kvtide.verify.client import complete, random_prompts
from kvtide.verify.servers import Server

VLLM_PYTHON = os.environ.get("KV_VLLM_PYTHON")
SHOTS = os.environ.get("SCREENSHOTS")
LIMIT = 96 * MIB
SMALLEST_EXTENT = 2 * MIB
PATIENCE = 120

pytestmark = [
    pytest.mark.web,
    pytest.mark.engine,
    pytest.mark.skipif(VLLM_PYTHON is None, reason="KV_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m"
    command = [str(VLLM_PYTHON), "-m", "kvtide.verify.models", "llama-wide", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def servers(model, directory, tmp_path):
    started = {}
    try:
        for name in ("chat", "code"):
            started[name] = Server(
                model,
                log=tmp_path / f"{name}.log",
                arguments=(
                    *("--served-model-name", "m", "--max-model-len", "2048", "--block-size", "32"),
                    *("--dtype", "float32"),
                ),
                environ={
                    "KVTIDE": "1",
                    "KVTIDE_NAME": name,
                    "KVTIDE_DIR": str(directory),
                    "KVTIDE_HOST_DEVICE": "live-page",
                    "KVTIDE_HOST_MEMORY": "256MiB",
                    "KVTIDE_LOG": "json",
                },
                python=str(VLLM_PYTHON),
            ).start()
        for server in started.values():
            server.wait_ready(900)
        yield started
    finally:
        for server in started.values():
            server.stop()


def load(server, seed, count=12):
    prompts = random_prompts(seed, count, 448)
    return complete(server.url, prompts, max_tokens=64, model="m", concurrency=count)


def run(directory, *arguments, **environ):
    return subprocess.Popen(
        [sys.executable, "-c", "from kvtide.cli import main; main()", *arguments],
        env=os.environ | {"KVTIDE_DIR": str(directory), "COLUMNS": "80"} | environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def held_bytes(directory, name):
    (path,) = Ledger.existing(directory)
    with Ledger.read(path) as observer:
        return sum(i.charged_bytes for i in observer.snapshot().instances if i.name == name)


def test_two_engines_on_the_page(servers, directory, browser, tmp_path):
    recording = run(directory, "record", "-o", str(tmp_path / "trace.json"))
    served = Served(directory)
    try:
        console_errors(browser)
        browser.get(served.address)
        for name in servers:
            until(browser, lambda name=name: row(browser, name), f"{name} is shown", PATIENCE)

        # Bars move.
        chat, code = (hue(browser, name) for name in ("chat", "code"))
        before = width(browser, chat)
        worker = threading.Thread(target=load, args=(servers["chat"], 1))
        worker.start()
        until(browser, lambda: width(browser, chat) > 2 * before + 20, "a bar grows", PATIENCE)
        worker.join()

        # A limit that is set in the page holds, under load.
        field = row(browser, "chat").find_element(By.TAG_NAME, "input")
        field.clear()
        field.send_keys(f"{LIMIT // MIB}MiB", Keys.ENTER)
        notice = browser.find_element(By.ID, "notice")
        until(browser, lambda: "96MiB" in notice.text, "the page says that it is done", PATIENCE)
        most = LIMIT + SMALLEST_EXTENT
        until(browser, lambda: held_bytes(directory, "chat") <= most, "it gives back", PATIENCE)
        worker = threading.Thread(target=load, args=(servers["chat"], 2))
        worker.start()
        seen = []
        while worker.is_alive():
            seen.append(held_bytes(directory, "chat"))
            worker.join(0.02)
        assert max(seen) <= most
        assert max(seen) > LIMIT // 2

        # Its other terms, in the dialog.
        fields = edit(browser, "code")
        for term, text in (("min", "32MiB"), ("priority", "2")):
            fields[term].clear()
            fields[term].send_keys(text)
        assert serious(browser) == []
        if SHOTS:
            browser.save_screenshot(str(Path(SHOTS) / f"terms-{browser.kvtide_scheme}.png"))
        fields["priority"].send_keys(Keys.ENTER)
        shown = "min 32 MiB, priority 2"
        until(browser, lambda: cell(browser, "code", "terms") == shown, "they are set", PATIENCE)
        load(servers["code"], 3, count=6)

        top = run(directory, "top", "--once")
        frame = top.communicate(timeout=60)[0]
        assert "chat" in frame
        assert "96MiB" in frame
        assert "min 32MiB, priority 2" in frame
        metrics = urllib.request.urlopen(f"{served.url}/metrics").read()
        promtool = ["promtool", "check", "metrics"]
        checked = subprocess.run(promtool, input=metrics, capture_output=True, check=False)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
        assert b'kvtide_shrinks_total{cause="limit"' in metrics
        assert b'call="create"' in metrics
        assert serious(browser) == []
        if SHOTS:
            browser.save_screenshot(str(Path(SHOTS) / f"page-{browser.kvtide_scheme}.png"))
            in_colour = run(directory, "top", "--once", FORCE_COLOR="1")
            (Path(SHOTS) / "top.ansi").write_text(in_colour.communicate(timeout=60)[0])
            (Path(SHOTS) / "metrics.txt").write_bytes(metrics)

        # One that is killed vanishes.
        for pid in servers["code"].pids():
            os.kill(pid, signal.SIGKILL)
        until(browser, lambda: row(browser, "code") is None, "it vanishes", PATIENCE)
        assert width(browser, code) == 0
        assert row(browser, "chat")
        assert console_errors(browser) == []
    finally:
        browser.get("about:blank")
        served.close()
        recording.send_signal(signal.SIGINT)
        said = recording.communicate(timeout=60)[0]
    assert "events" in said
    drawn = run(directory, "plot", str(tmp_path / "trace.json"), "-o", str(tmp_path / "m.png"))
    drawn.communicate(timeout=120)
    assert drawn.returncode == 0
    if SHOTS:
        for name in ("trace.json", "m.png", "chat.log"):
            (Path(SHOTS) / name).write_bytes((tmp_path / name).read_bytes())
