"""What the size of extents costs a kernel that reads a KV cache: gigabytes a second.

    python bench/gpu/pages.py [--gib 24] [--repeats 6]

A cache of 32 layers, 64 KiB of each layer a block, is read layer by layer, one program a block, as
attention reads it: laid out per layer, or block-major, where the layers of a block lie side by
side and each layer's kernel touches every page. Beneath it are plain memory of torch's, or handles
of one size each, mapped in the order of their creation or shuffled. Some 40 seconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from drive import save, table

from kvtide.device.cuda import CudaDevice
from kvtide.units import GIB, MIB

LAYERS = 32
PART_BYTES = 64 << 10  # of one layer and block
HANDLES_MIB = (2, 8, 32, 128, 512, 4096)


@triton.jit
def read(base, order, sums, layer_at, block_stride, WORDS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Sum one layer's part of one block; offsets and strides in words of 4 bytes."""
    program = tl.program_id(0)
    block = tl.load(order + program).to(tl.int64)
    start = base + layer_at + block * block_stride
    total = tl.zeros([CHUNK], tl.int32)
    for at in range(0, WORDS, CHUNK):
        total += tl.load(start + at + tl.arange(0, CHUNK))
    tl.store(sums + program, tl.sum(total))


class Words:
    """Memory as Triton takes it."""

    dtype = torch.int32

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def mapped(device: Any, size_bytes: int, handle_bytes: int, *, shuffled: bool) -> Iterator[int]:
    """Addresses backed by handles of one size."""
    handles = []
    for _ in range(size_bytes // handle_bytes):
        handle = device.create(handle_bytes)
        assert handle is not None, "the device is too full"
        handles.append(handle)
    if shuffled:
        random.Random(1).shuffle(handles)
    address = device.reserve(size_bytes)
    places = range(address, address + size_bytes, handle_bytes)
    for place, handle in zip(places, handles, strict=True):
        device.map(place, handle)
    device.zero([(address, size_bytes)])
    device.fence().wait()
    yield address
    torch.cuda.synchronize()
    for place, handle in zip(places, handles, strict=True):
        device.unmap(place, handle)
        device.release(handle)
    device.unreserve(address, size_bytes)


def rates(address: int, size_bytes: int, repeats: int) -> dict[str, float]:
    """Gigabytes a second of each layout and order of the blocks, at the median."""
    blocks = size_bytes // PART_BYTES // LAYERS
    words = PART_BYTES // 4
    layouts = {
        "per-layer": (blocks * words, words),
        "block-major": (words, LAYERS * words),
    }
    orders = {"in turn": torch.arange(blocks), "at random": torch.randperm(blocks)}
    sums = torch.empty(blocks, dtype=torch.int32, device="cuda")
    found = {}
    for layout, (layer_stride, block_stride) in layouts.items():
        for name, order in orders.items():
            on_gpu = order.to("cuda", torch.int32)
            seconds = []
            for number in range(repeats + 1):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                for layer in range(LAYERS):
                    read[(blocks,)](
                        Words(address),
                        on_gpu,
                        sums,
                        layer * layer_stride,
                        block_stride,
                        WORDS=words,
                        CHUNK=4096,
                    )
                ended.record()
                torch.cuda.synchronize()
                if number:
                    seconds.append(began.elapsed_time(ended) / 1e3)
            found[f"{layout}, {name}"] = round(size_bytes / statistics.median(seconds) / 1e9, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, nargs="+", default=[8, 24, 64])
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.zeros(1, device="cuda")
    device = CudaDevice(0)
    device.set_stream(torch.cuda.current_stream().cuda_stream)
    rows: list[dict[str, Any]] = []
    for gib in options.gib:
        size_bytes = gib * GIB
        plain = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
        found = rates(plain.data_ptr(), size_bytes, options.repeats)
        rows.append({"gib": gib, "backing": "torch", **found})
        del plain
        torch.cuda.empty_cache()
        for handle_mib in HANDLES_MIB:
            for shuffled in (False, True) if handle_mib < 512 else (False,):
                if shuffled and gib != 24:
                    continue
                with mapped(device, size_bytes, handle_mib * MIB, shuffled=shuffled) as address:
                    found = rates(address, size_bytes, options.repeats)
                backing = f"{handle_mib} MiB{', shuffled' * shuffled}"
                rows.append({"gib": gib, "backing": backing, **found})
        save("pages", {"rows": rows})
    table([list(rows[0]), *([*row.values()] for row in rows)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
