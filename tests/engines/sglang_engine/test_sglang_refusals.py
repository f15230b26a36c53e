"""What would break silently is refused when a server starts, by name."""

from __future__ import annotations

import importlib.util
import time

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sgl_kernel") is None, reason="needs SGLang"),
]

# What an ordinary start has, as far as it is looked at; a version may lack some of the fields.
PLAIN = {"kv_cache_dtype": "auto", "pp_size": 1, "dp_size": 1, "disaggregation_mode": "null"}

# Each of what is refused, by its field: another value than what is supported, and what is said.
FIELDS = {
    "pp_size": (2, "--pp-size"),
    "dp_size": (2, "--dp-size"),
    "nnodes": (2, "--nnodes"),
    "disaggregation_mode": ("decode", "--disaggregation-mode"),
    "enable_hierarchical_cache": (True, "HiCache"),
    "enable_lmcache": (True, "LMCache"),
    "enable_flexkv": (True, "FlexKV"),
    "enable_hisparse": (True, "HiSparse"),
    "enable_unified_memory": (True, "unified memory pool"),
    "enable_page_major_kv_layout": (True, "page-major layout"),
    "radix_cache_backend": ("other", "--radix-cache-backend"),
    "speculative_algorithm": ("EAGLE", "--speculative-algorithm"),
    "enable_pdmux": (True, "--enable-pdmux"),
    "dcp_size": (2, "--dcp-size"),
    "attn_cp_size": (2, "--attn-cp-size"),
    "enable_unified_cache_external_linker": (True, "--enable-unified-cache-external-linker"),
    "kv_canary": ("log", "--kv-canary"),
    "use_ray": (True, "--use-ray"),
    "kv_cache_dtype": ("fp4_e2m1", "fp4_e2m1"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_each_of_them_is_named(field: str) -> None:
    from kvtide.engines.sglang import supported
    from kvtide.errors import UnsupportedError

    value, said = FIELDS[field]
    supported.check(PLAIN)
    with pytest.raises(UnsupportedError, match=said):
        supported.check(PLAIN | {field: value})


def test_nothing_that_is_refused_is_left_out_here() -> None:
    from kvtide.engines.sglang import supported

    assert {refusal.field for refusal in supported._REFUSED} | {"kv_cache_dtype"} == set(FIELDS)


@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "bfloat16", "fp8_e5m2", "fp8_e4m3"])
def test_float_and_fp8_are_not_refused(kv_dtype: str) -> None:
    from kvtide.engines.sglang import supported

    supported.check(PLAIN | {"kv_cache_dtype": kv_dtype})


REFUSED = {
    "pipeline": (("--pp-size", "2"), "--pp-size"),
    "unified": (("--enable-unified-memory",), "unified memory pool"),
    "canary": (("--kv-canary", "log"), "--kv-canary"),
    "hicache": (("--enable-hierarchical-cache",), "HiCache"),
    "disaggregation": (("--disaggregation-mode", "prefill"), "--disaggregation-mode"),
    "fp4": (("--kv-cache-dtype", "fp4_e2m1"), "fp4"),
}
# What its own checks of 0.5.23 say first, where 0.5.20 gets as far as to ask kvtide.
REFUSED_BY_SGLANG = ("invalid choice", "are not in the allowed set")


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(sglang_fleet, case: str) -> None:
    arguments, said = REFUSED[case]
    fleet = sglang_fleet(64 << 20)
    server = fleet.start("llama-wide", "r", "--mem-fraction-static", "0.9", *arguments)
    deadline = time.monotonic() + 300
    while server.exit_status() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if any(words in server.log.read_text() for words in REFUSED_BY_SGLANG):
        pytest.skip("this SGLang refuses it on a CPU by itself")
    assert server.exit_status() == 1, server.log_tail()
    (line,) = [x for x in server.log.read_text().splitlines() if x.startswith("kvtide: ")]
    assert said in line
    assert "KVTIDE=0" in line or "supported are" in line
    assert not server.pids()
