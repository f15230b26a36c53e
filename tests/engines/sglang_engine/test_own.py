"""What a rank on a GPU tells of itself once its graphs are captured; the GPU is a stand-in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sgl_kernel") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

import torch

from kvtide.device.base import DeviceInfo
from kvtide.device.cuda import CudaDevice
from kvtide.engines.seats import spec_of
from kvtide.engines.sglang.own import headroom_after_capture, record_own
from kvtide.ledger import Ledger
from kvtide.ranks.seat import Seat
from kvtide.settings import Settings
from kvtide.units import GIB, MIB

pytestmark = pytest.mark.torch

TOTAL_BYTES = 16 * GIB


class Gpu(CudaDevice):
    def __init__(self, held_bytes: int | None, backend: str = "cuda") -> None:
        self._info = DeviceInfo(
            uuid="GPU-1",
            backend=backend,
            name="a stand-in",
            total_bytes=TOTAL_BYTES,
            granularity_bytes=2 * MIB,
        )
        self.held_bytes = held_bytes

    def own_bytes(self) -> int | None:
        return self.held_bytes


class Rank:
    """Two pools of one rank, and its place in a ledger."""

    def __init__(self, directory: Path, device: Gpu) -> None:
        self.ledger = Ledger.open(directory, spec_of(device.info, Settings(dir=directory)))
        self.instance = self.ledger.register("a", explicit=True)
        self.samples = 0
        seat = Seat(self.ledger, self.instance)
        # Who tells what the instance has taken of its headroom.
        self.told: list[Callable[[], int]] = []
        account = SimpleNamespace(sample=self._sample, take_headroom=self.told.append)
        self.parts: list[Any] = [
            SimpleNamespace(
                device=device,
                seat=seat,
                memory=SimpleNamespace(
                    account=account, arena=SimpleNamespace(mapped_bytes=mapped_bytes)
                ),
            )
            for mapped_bytes in (64 * MIB, 16 * MIB)
        ]

    def _sample(self) -> bool:
        self.samples += 1
        return True

    def close(self) -> None:
        self.instance.close()
        self.ledger.close()

    def headroom(self) -> int:
        (found,) = self.ledger.snapshot().instances
        return found.terms.headroom_bytes


@pytest.fixture(autouse=True)
def schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    told = SimpleNamespace(mem_fraction_static=0.75)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: told)


def scheduler() -> Any:
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))


def test_what_is_set_aside_and_not_held_yet_stays_free() -> None:
    assert headroom_after_capture(16 * GIB, 0.75, own_bytes=5 * GIB, weights_bytes=3 * GIB) == (
        4 * GIB - 2 * GIB
    )
    # More is held than SGLang sets aside: nothing has to be free on top.
    assert headroom_after_capture(16 * GIB, 0.75, own_bytes=9 * GIB, weights_bytes=3 * GIB) == 0


def test_it_is_told_once_graphs_are_captured(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Gpu(80 * MIB + 4 * MIB + 1 * GIB))
    record_own(scheduler(), rank.parts)
    (found,) = rank.ledger.snapshot().instances
    assert found.non_kv_bytes == 4 * MIB + 1 * GIB
    assert found.non_kv_source == "driver"
    assert rank.headroom() == 3 * GIB
    assert rank.samples == 1
    rank.close()


def test_what_torch_reserves_from_then_on_is_taken_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = [1 * GIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved[0])
    rank = Rank(tmp_path, Gpu(80 * MIB + 4 * MIB + 1 * GIB))
    record_own(scheduler(), rank.parts)
    (told,) = rank.told
    assert told() == 0
    reserved[0] = 3 * GIB
    assert told() == 2 * GIB
    reserved[0] = 9 * GIB
    assert told() == rank.headroom() == 3 * GIB
    rank.close()


def test_a_larger_headroom_that_was_set_by_hand_stands(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Gpu(2 * GIB))
    rank.ledger.set_terms("a", lambda terms: terms._replace(headroom_bytes=8 * GIB))
    record_own(scheduler(), rank.parts)
    assert rank.headroom() == 8 * GIB
    rank.close()


def test_without_post_capture_nothing_is_kept_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_POST_CAPTURE", "0")
    rank = Rank(tmp_path, Gpu(2 * GIB))
    record_own(scheduler(), rank.parts)
    assert rank.headroom() == 0
    assert rank.samples == 1
    rank.close()


def test_where_the_driver_does_not_tell_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1 * GIB)
    rank = Rank(tmp_path, Gpu(None))
    record_own(scheduler(), rank.parts)
    (found,) = rank.ledger.snapshot().instances
    assert found.non_kv_bytes == 1 * GIB + 640 * MIB
    assert found.non_kv_source == "torch"
    rank.close()


def test_on_the_host_nothing_counts_beside_the_pools(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Gpu(2 * GIB, backend="host"))
    record_own(scheduler(), rank.parts)
    assert rank.samples == 0
    rank.close()
