"""Fleets of SGLang servers; `sglang_fleet` is there beside what all engine tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet

from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.sglang_servers import SGLangServer

PROBE = Path(__file__).parent / "probe"


class SGLangFleet(Fleet):
    """Servers of SGLang on one host device."""

    def start(  # type: ignore[override]
        self,
        kind: str,
        name: str | None,
        *arguments: str,
        environ: dict[str, str] | None = None,
    ) -> SGLangServer:
        """Start a server under kvtide by this name, or a native one (None); it is not ready yet.

        Both keep one plan of the cache: the size of the device.
        """
        number = len(self._started)
        given = {} if name is None else self.environ | {"KVTIDE_NAME": name}
        paths = [str(PROBE), os.environ.get("PYTHONPATH")]
        given["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        given["PROBE_LOG"] = str(self.directory / f"rounds-{number}.jsonl")
        server = SGLangServer(
            ensure_model(kind, self._models),
            log=self.directory / f"{name or 'native'}-{number}.log",
            arguments=["--dtype", dtype_of(kind), "--sleep-on-idle", *arguments],
            environ=given | (environ or {}),
        )
        self._started.append(server)
        server.rounds = Path(given["PROBE_LOG"])  # type: ignore[attr-defined]
        server.start()
        return server

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """What the log of a server says that kvtide did, of one kind."""
        found = []
        for server in self._started:
            if server.log.name.startswith(f"{name}-"):
                for line in server.log.read_text(errors="replace").splitlines():
                    if line.startswith("{") and f'"{kind}"' in line:
                        found.append(json.loads(line))
        return found


@pytest.fixture(scope="module")
def sglang_fleet(
    tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Callable[[int], SGLangFleet]]:
    """Makes fleets on devices of so many bytes; their servers end with the module."""
    fleets: list[SGLangFleet] = []

    def make(size_bytes: int) -> SGLangFleet:
        fleets.append(SGLangFleet(tmp_path_factory.mktemp("fleet"), models, size_bytes))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.stop()
    for fleet in fleets:
        assert fleet.held_bytes() == 0
