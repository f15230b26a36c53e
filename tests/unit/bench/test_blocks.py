"""The block benchmark runs against the pool as it is, with and without a prefix cache."""

import pytest

pytest.importorskip("vllm")

from kvtide.bench.blocks import measure_blocks

# vLLM and torch warn of themselves as they are imported.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("caching", [False, True])
def test_both_pools_serve_the_same_rounds(caching):
    figures = measure_blocks(blocks=8000, pairs=1, caching=caching)
    assert figures["caching"] is caching
    assert figures["native_ns_per_block"] > 0
    assert figures["kvtide_ns_per_block"] > 0
    ratio = figures["ratio"]
    assert ratio["min"] == ratio["median"] == ratio["max"] > 0
