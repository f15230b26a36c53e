"""vLLM's allocating calls: answered in the arena, listed by layers, and held against the budget."""

import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvtide.device.base import DeviceInfo  # noqa: E402
from kvtide.engines.vllm.allocated import list_allocated  # noqa: E402
from kvtide.engines.vllm.answered import Answered  # noqa: E402
from kvtide.engines.vllm.eras import CacheLayout, read_layout  # noqa: E402
from kvtide.errors import NeverFitsError, UnsupportedError  # noqa: E402
from kvtide.units import MIB  # noqa: E402

pytestmark = pytest.mark.torch

BLOCKS, PAGE = 10, 16 * 2 * (8 + 8) * 4  # 16 tokens, 2 heads of 8, K and V, float32


def configuration(*, interleaved=False):
    """Two layers of full attention and two of a window that take turns with them."""
    from vllm.v1 import kv_cache_interface as vllm

    if "layer_stride" not in vllm.KVCacheTensor.__dataclass_fields__:
        pytest.skip("this vLLM places layers otherwise")
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    full = vllm.FullAttentionSpec(**shape)
    window = vllm.SlidingWindowSpec(**shape, sliding_window=32)
    assert full.page_size_bytes == PAGE
    layer_stride, block_stride = (PAGE, 2 * PAGE) if interleaved else (PAGE * BLOCKS, PAGE)
    size = 2 * PAGE * BLOCKS
    tensors = [
        vllm.KVCacheTensor(size, layers, layer_stride, block_stride, 0)
        for layers in (["f0", "f1"], ["w0", "w1"])
    ]
    groups = [
        vllm.KVCacheGroupSpec(["f0", "f1"], full),
        vllm.KVCacheGroupSpec(["w0", "w1"], window),
    ]
    return vllm.KVCacheConfig(BLOCKS, tensors, groups)


@pytest.fixture
def memory():
    buffer = ctypes.create_string_buffer(MIB)
    info = DeviceInfo(**dict.fromkeys(DeviceInfo.__dataclass_fields__) | {"backend": "host"})
    arena = SimpleNamespace(address=ctypes.addressof(buffer), device=SimpleNamespace(info=info))
    return SimpleNamespace(arena=arena, buffer=buffer)


def answered(memory, budget_bytes, config=None):
    layout = read_layout(config or configuration(), 4096)
    return Answered(layout, memory, torch.device("cpu"), budget_bytes)


@pytest.mark.parametrize("interleaved", [False, True])
def test_layers_that_take_turns_share_one_line(interleaved):
    config = configuration(interleaved=interleaved)
    found = list_allocated(config, [2 * PAGE * BLOCKS], [])
    assert [a.layers for a in found] == [("f0", "w0"), ("f1", "w1")]
    assert {a.kind for a in found} == {"full_attention + sliding_window"}
    assert [a.bytes for a in found] == [PAGE * BLOCKS] * 2
    assert {a.count for a in found} == {BLOCKS}


def test_what_was_asked_for_beyond_the_layers_is_listed():
    found = list_allocated(configuration(), [2 * PAGE * BLOCKS + 100], [7, 9])
    assert [(a.name, a.bytes) for a in found[2:]] == [
        ("page padding", 100),
        ("unlisted call 0", 7),
        ("unlisted call 1", 9),
    ]
    assert sum(a.bytes for a in found) == 2 * PAGE * BLOCKS + 116


def test_a_listed_call_is_answered_in_the_arena(memory):
    with answered(memory, 2 * PAGE * BLOCKS) as mode:
        tensor = torch.zeros(2 * PAGE * BLOCKS, dtype=torch.int8)
        other = torch.zeros(5)
    assert tensor.data_ptr() == memory.arena.address
    assert other.tolist() == [0.0] * 5
    assert len(mode.check(configuration(), "a")) == 2


def test_more_than_the_budget_is_refused_with_the_table(memory):
    with answered(memory, 2 * PAGE * BLOCKS - 1) as mode:
        torch.zeros(2 * PAGE * BLOCKS, dtype=torch.int8)
    with pytest.raises(NeverFitsError, match="a would allocate 40960 bytes") as refusal:
        mode.check(configuration(), "a")
    assert "full_attention + sliding_window" in str(refusal.value)
    assert "sum" in str(refusal.value)


def test_an_unlisted_call_above_the_budget_is_not_let_through(memory):
    with answered(memory, 2 * PAGE * BLOCKS + 1000):
        torch.zeros(2 * PAGE * BLOCKS, dtype=torch.int8)
        torch.zeros((10, 100), dtype=torch.int8)
        with pytest.raises(NeverFitsError, match="does not list"):
            torch.zeros(10, 100, dtype=torch.int8)


def test_a_call_that_never_came_is_not_supported(memory):
    with answered(memory, None) as mode:
        torch.zeros(123, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="0 of the 1 KV-cache"):
        mode.check(configuration(), "a")


def test_without_a_budget_nothing_is_refused(memory):
    with answered(memory, None) as mode:
        torch.zeros(2 * PAGE * BLOCKS, dtype=torch.int8)
    assert isinstance(read_layout(configuration(), 4096), CacheLayout)
    assert sum(a.bytes for a in mode.check(configuration(), "a")) == 2 * PAGE * BLOCKS
