"""What would break silently is refused when a server starts, by name."""

from __future__ import annotations

import importlib.util
import time

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="needs SGLang"),
]

REFUSED = {
    "pipeline": (("--pp-size", "2"), "--pp-size"),
    "hicache": (("--enable-hierarchical-cache",), "HiCache"),
    "disaggregation": (("--disaggregation-mode", "prefill"), "--disaggregation-mode"),
    "fp4": (("--kv-cache-dtype", "fp4_e2m1"), "fp4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(sglang_fleet, case: str) -> None:
    arguments, said = REFUSED[case]
    fleet = sglang_fleet(64 << 20)
    server = fleet.start("llama-wide", "r", "--mem-fraction-static", "0.9", *arguments)
    deadline = time.monotonic() + 300
    while server.exit_status() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.exit_status() == 1, server.log_tail()
    (line,) = [x for x in server.log.read_text().splitlines() if x.startswith("kvtide: ")]
    assert said in line
    assert "KVTIDE=0" in line or "supported are" in line
    assert not server.pids()
