"""`kvtide serve` as a process, for the tests beside this file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
