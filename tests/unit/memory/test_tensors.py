"""Tensors over an arena: exact, lazy, and no trouble at the interpreter's end."""

import os
import subprocess
import sys
import time

import pytest

from kvtide.device.host import HostDevice
from kvtide.memory import Arena, Span
from kvtide.memory.tensors import _DL_CPU, _from_dlpack, tensor_over
from kvtide.units import GIB, MIB
from memory_invariants import CountingMeter

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

WAYS = {
    "frombuffer": lambda address, size, info: tensor_over(address, size, info, 0),
    # The way of the GPU, on the host's memory.
    "dlpack": lambda address, size, info: _from_dlpack(address, size, _DL_CPU, 0),
}


@pytest.fixture
def arena():
    device = HostDevice(64 * MIB, uuid=f"tensors-{os.getpid()}-{time.monotonic_ns()}")
    arena = Arena(device, 256 * GIB, CountingMeter())
    yield arena
    arena.close()
    device.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_is_exact_over_addresses_with_nothing_mapped(arena, way):
    size_bytes = 256 * GIB - 6 * MIB
    tensor = WAYS[way](arena.address + 2 * MIB, size_bytes, arena.device.info)
    assert tensor.dtype is torch.int8
    assert tensor.device.type == "cpu"
    assert tuple(tensor.shape) == (size_bytes,)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == arena.address + 2 * MIB
    assert tensor.untyped_storage().nbytes() == size_bytes
    assert tensor.storage_offset() == 0


@pytest.mark.parametrize("way", WAYS)
def test_views_of_it_read_and_write_what_is_mapped_later(arena, way):
    tensor = WAYS[way](arena.address, 8 * MIB, arena.device.info)
    view = tensor[4 * MIB : 6 * MIB].view(torch.float16)
    assert arena.grow([Span(4 * MIB, 2 * MIB)])
    assert not view.any()
    view.fill_(1.5)
    assert arena.split(Span(4 * MIB, 2 * MIB), [Span(4 * MIB, 2 * MIB)])
    assert torch.equal(view, torch.full((MIB,), 1.5, dtype=torch.float16))
    arena.shrink([Span(4 * MIB, 2 * MIB)])
    assert arena.grow([Span(4 * MIB, 2 * MIB)])
    assert not view.any()


def test_a_tensor_of_nothing_is_refused(arena):
    with pytest.raises(ValueError, match="0 bytes"):
        tensor_over(arena.address, 0, arena.device.info, 0)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_survive_the_end_of_the_interpreter(way):
    source = f"""
import sys, torch, builtins
sys.path[:0] = {sys.path!r}
from test_tensors import WAYS
from kvtide.device.host import HostDevice
device = HostDevice(8 << 20, uuid="exit-{os.getpid()}")
address = device.reserve(4 << 20)
handle = device.create(2 << 20)
device.map(address, handle)
tensors = [WAYS[{way!r}](address, 2 << 20, device.info) for _ in range(50)]
tensors[0].fill_(3)
assert int(tensors[1].sum()) == 3 * (2 << 20)
# Dropped early, dropped by the modules' end, and in places that go last of all.
del tensors[10:20]
torch.kept = tensors[0].view(torch.int16)
builtins.kept = tensors[1]
sys.kept = [tensors[2]]
cycle = [tensors[3]]
cycle.append(cycle)
print("done", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
