"""A served directory and a real browser on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from observed_world import World

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BROWSER_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1200,1000"),
)


class Served:
    """`kvtide serve` as a process, over one directory."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from kvtide.cli import main; main()", "serve",
             "--port", "0", "--interval", "0.2"],
            env=os.environ | {"KVTIDE_DIR": str(directory)},
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.url, _, self.token = self.address.partition("/#token=")
        assert self.token

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path) / "ledgers"


@pytest.fixture
def world(directory):
    made = World(directory)
    yield made
    made.close()


@pytest.fixture
def served(world):
    made = Served(world.directory)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request):
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    profile = tempfile.mkdtemp()
    for argument in (*BROWSER_ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(shutil.which("chromedriver") or "chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": request.param}]},
    )
    driver.kvtide_scheme = request.param
    yield driver
    driver.quit()
    shutil.rmtree(profile, ignore_errors=True)
