"""What all engine tests share: a place for models, and fleets that leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet import Fleet


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are made; kept between runs where `KV_TEST_MODELS` names a directory."""
    kept = os.environ.get("KV_TEST_MODELS")
    return Path(kept) if kept else tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def make_fleet(
    tmp_path_factory: pytest.TempPathFactory, models: Path
) -> Iterator[Callable[[int], Fleet]]:
    """Makes fleets on devices of so many bytes; their servers end with the module."""
    fleets = []

    def make(size_bytes: int) -> Fleet:
        fleets.append(Fleet(tmp_path_factory.mktemp("fleet"), models, size_bytes))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.stop()
    for fleet in fleets:
        assert fleet.held_bytes() == 0
        left = (
            sorted(path.name for path in fleet.ledgers.iterdir()) if fleet.ledgers.exists() else []
        )
        assert left in ([], [f"{fleet.uuid}.ledger"])
