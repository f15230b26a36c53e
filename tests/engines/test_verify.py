"""The matrix on real servers: a sound kvtide passes, and broken ones fail what is about them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from fleet import PROBE

from kvtide.units import MIB
from kvtide.verify.life import Life
from kvtide.verify.model_case import KVTIDE, NATIVE, judge_model, run_life
from kvtide.verify.models import dtype_of, ensure_model
from kvtide.verify.servers import Options, Server
from kvtide.verify.site import Model, Site

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

KIND = "llama"
DEVICE_BYTES = 128 * MIB
OPTIONS = Options(dtype_of(KIND), 6144)
TOKENS = {"gen_seq_tokens_equal", *(f"apc_{n}_tokens_equal" for n in range(3))}
HITS = {f"apc_{n}_cached_tokens_equal" for n in range(3)}


@pytest.fixture(scope="module")
def model(models: Path) -> Model:
    return Model(KIND, ensure_model(KIND, models), dtype_of(KIND))


def live(directory: Path, model: Model, *, native: bool, fault: str | None = None) -> Life:
    extra = {}
    if fault is not None:
        paths = [str(PROBE), os.environ.get("PYTHONPATH")]
        extra = {"PROBE_FAULT": fault, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    site = Site(
        directory / "work",
        directory / "logs",
        backend="host",
        size_bytes=DEVICE_BYTES,
        extra=extra,
    )
    options = Options(
        OPTIONS.dtype, OPTIONS.max_model_len, kv_bytes=DEVICE_BYTES if native else None
    )
    server = site.server(Server, model, NATIVE if native else KVTIDE, options, native=native)
    found = run_life(site, server, native=native, margins=False, say=print)
    assert site.left_bytes() == 0
    return found


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Life:
    return live(tmp_path_factory.mktemp("native"), model, native=True)


def failed(native: Life, elastic: Life) -> set[str]:
    checks = judge_model(native, elastic, exact=True)
    print(*checks, sep="\n")
    return {check.title for _, check in checks if not check.held}


def test_a_sound_kvtide_passes(tmp_path: Path, model: Model, native: Life) -> None:
    assert failed(native, live(tmp_path, model, native=False)) == set()


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("frees-early", TOKENS),
        ("forgets", HITS),
        ("leaves-record", {"ledger_empty_after_exit"}),
    ],
)
def test_a_broken_kvtide_fails_what_is_about_it(
    tmp_path: Path, model: Model, native: Life, fault: str, checks: set[str]
) -> None:
    assert failed(native, live(tmp_path, model, native=False, fault=fault)) == checks
