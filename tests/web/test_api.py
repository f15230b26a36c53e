"""The API against its own description, by thousands of requests that schemathesis makes up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.web


def test_the_api_does_what_its_description_says(served, world, tmp_path):
    world.engine("chat").hold(40, 60, 4)
    world.engine("code").hold(10, 0, 0)
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            *("run", f"{served.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {served.token}"),
            *("--exclude-path", "/api/v1/events"),  # a stream has no end
            *("--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "60")),
            *("--seed", "7", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert served.process.poll() is None
