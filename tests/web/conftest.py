"""A served directory and a real browser on it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from served import Served

from observed_world import World

BROWSER_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1200,1000"),
)


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
