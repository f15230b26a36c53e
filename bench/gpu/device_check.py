"""Every verb of a GPU once, held against the driver's figures: PYTHONPATH=src python THIS.

Needs torch and the CUDA bindings, and a GPU that nobody else uses meanwhile. Prints a table;
ends with status 1 at the first thing that is not so. `--child WHAT` is how it calls itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from kvtide.device.cuda import CudaDevice
from kvtide.errors import DeviceError
from kvtide.memory import Arena, Span
from kvtide.memory.tensors import tensor_over
from kvtide.units import GIB, MIB, format_size

ROWS: list[tuple[str, str]] = []


class Meter:
    """Counts what an arena holds."""

    held_bytes = 0

    def created(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes

    def released(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


def row(what: str, value: object = "ok") -> None:
    ROWS.append((what, str(value)))
    print(f"  {what:<58} {value}", flush=True)


def median_us(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e6:.1f}"


def timed(into: list[float], call: Callable[..., object], *arguments: object) -> object:
    start = time.perf_counter()
    result = call(*arguments)
    into.append(time.perf_counter() - start)
    return result


def verbs(device: CudaDevice) -> None:
    for size_bytes in (2 * MIB, 64 * MIB, 512 * MIB):
        times: dict[str, list[float]] = {n: [] for n in ("create", "map", "unmap", "release")}
        address = device.reserve(2 * size_bytes)
        for _ in range(20):
            free_bytes = device.free_bytes()
            handle = timed(times["create"], device.create, size_bytes)
            assert handle is not None
            assert device.free_bytes() == free_bytes - size_bytes, "create takes no memory"
            timed(times["map"], device.map, address + size_bytes, handle)
            timed(times["unmap"], device.unmap, address + size_bytes, handle)
            timed(times["release"], device.release, handle)
            assert device.free_bytes() == free_bytes, "release gives no memory back"
        device.unreserve(address, 2 * size_bytes)
        cost = " / ".join(median_us(times[name]) for name in times)
        row(f"create / map / unmap / release of {format_size(size_bytes)}, us", cost)
    cost_of_free: list[float] = []
    for _ in range(100):
        timed(cost_of_free, device.free_bytes)
    row("free_bytes, us", median_us(cost_of_free))
    free_bytes = device.free_bytes()
    too_much = (free_bytes // (2 * MIB) + 16) * 2 * MIB
    assert device.create(too_much) is None
    assert device.free_bytes() == free_bytes
    row("more than there is is answered None")


def same_context(device: CudaDevice) -> None:
    torch.zeros(1, device=f"cuda:{device.ordinal}")
    assert torch.cuda.mem_get_info(device.ordinal)[0] == device.free_bytes()
    row("torch sees the same free memory, in the same context")


def growing(device: CudaDevice) -> None:
    meter = Meter()
    arena = Arena(device, 256 * GIB, meter)
    whole = tensor_over(arena.address, 256 * GIB, device.info, device.ordinal)
    assert whole.device == torch.device("cuda", device.ordinal)
    assert tuple(whole.shape) == (256 * GIB,)
    assert whole.untyped_storage().nbytes() == 256 * GIB
    row("a tensor over 256GiB with nothing mapped")

    first = Span(GIB, 64 * MIB)
    for _ in range(2):
        # The second time round, the driver hands out memory that was just filled.
        assert arena.grow([first])
        part = whole[first.offset_bytes : first.end_bytes]
        assert not part.any().item(), "new memory is not zero"
        part.fill_(-1)
        torch.cuda.synchronize()
        arena.shrink([first])
    row("new memory is zeros, whoever had it before")

    side = torch.cuda.Stream()
    device.set_stream(side.cuda_stream)
    assert arena.grow([first])
    with torch.cuda.stream(side):
        part = whole[first.offset_bytes : first.end_bytes]
        part.view(torch.int64).copy_(torch.arange(8 * MIB, device=part.device))
        keep = [
            Span(first.offset_bytes + 6 * MIB, 2 * MIB),
            Span(first.offset_bytes + 32 * MIB, 4 * MIB),
        ]
        before_bytes = device.free_bytes()
        start = time.perf_counter()
        assert arena.split(first, keep)
        row("split 64MiB into 2 + 4MiB, us", f"{(time.perf_counter() - start) * 1e6:.0f}")
        assert device.free_bytes() - before_bytes == 58 * MIB, "a split keeps too much"
        for span in keep:
            at = (span.offset_bytes - first.offset_bytes) // 8
            expected = torch.arange(at, at + span.size_bytes // 8, device=part.device)
            got = whole[span.offset_bytes : span.end_bytes].view(torch.int64)
            assert torch.equal(got, expected), "a split lost contents"
    assert arena.mapped_bytes == meter.held_bytes == 6 * MIB
    row("what is kept is in place and whole, the rest is free")

    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        fence = device.fence()
        assert not fence.passed()
        fence.wait()
        assert fence.passed()
    device.set_stream(0)
    row("a fence waits for the stream's work")
    arena.close()
    assert meter.held_bytes == 0


def graph(device: CudaDevice) -> None:
    arena = Arena(device, GIB, Meter())
    whole = tensor_over(arena.address, GIB, device.info, device.ordinal)
    span = Span(512 * MIB, 2 * MIB)
    part = whole[span.offset_bytes : span.end_bytes]
    # The kernel is loaded before, on memory of torch's own; capture launches nothing.
    torch.zeros(2 * MIB, dtype=torch.int8, device=part.device).add_(1)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        part.add_(1)
    for _ in range(2):
        assert arena.grow([span])
        for times in (1, 2):
            captured.replay()
            torch.cuda.synchronize()
            assert (part == times).all().item()
        arena.shrink([span])
    row("a graph captured over unmapped addresses, mapped twice")
    del captured
    arena.close()


def run_child(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, "--child", what], capture_output=True, text=True, check=False
    )


def children(device: CudaDevice) -> None:
    ended = run_child("exit")
    assert ended.returncode == 0, ended
    row("tensors outlive the interpreter")
    ended = run_child("stray")
    assert ended.returncode != 0, "an access to unmapped memory went unnoticed"
    assert "illegal memory access" in ended.stderr, ended.stderr
    row("an access to unmapped memory is an error")

    pid = os.fork()
    if pid == 0:
        try:
            device.create(2 * MIB)
        except DeviceError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    row("a forked child is refused")

    before_bytes = device.free_bytes()
    parent = subprocess.Popen(
        [sys.executable, __file__, "--child", "orphan"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    held_bytes = before_bytes - device.free_bytes()
    assert held_bytes >= GIB
    parent.kill()
    parent.wait()
    start = time.perf_counter()
    while before_bytes - device.free_bytes() >= GIB and time.perf_counter() - start < 2:
        time.sleep(0.001)
    waited = time.perf_counter() - start
    row(
        "still held 2 s at most after kill -9 of a forked holder",
        f"{format_size(before_bytes - device.free_bytes())} after {waited * 1e3:.0f} ms",
    )
    os.kill(orphan, signal.SIGKILL)
    start = time.perf_counter()
    while before_bytes != device.free_bytes() and time.perf_counter() - start < 5:
        time.sleep(0.001)
    assert device.free_bytes() == before_bytes, "memory of dead processes is not back"
    row("all of it is back, ms after its child went", f"{(time.perf_counter() - start) * 1e3:.0f}")


def child(what: str, ordinal: int) -> None:
    device = CudaDevice(ordinal)
    if what == "orphan":
        handle = device.create(GIB)
        assert handle is not None
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        print(pid, flush=True)
        time.sleep(60)
        return
    address = device.reserve(4 * MIB)
    handle = device.create(2 * MIB)
    assert handle is not None
    device.map(address, handle)
    tensors = [tensor_over(address, 4 * MIB, device.info, ordinal) for _ in range(50)]
    tensors[0][: 2 * MIB].fill_(1)
    if what == "stray":
        tensors[1][2 * MIB :].fill_(1)
    torch.cuda.synchronize()
    fences = [device.fence() for _ in range(3)]
    torch.kept = (tensors[0].view(torch.int16), fences)
    sys.kept = tensors[2]
    cycle: list[object] = [tensors[3]]
    cycle.append(cycle)
    del tensors[10:20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--child", choices=["exit", "stray", "orphan"])
    options = parser.parse_args()
    if options.child:
        child(options.child, options.device)
        return 0
    device = CudaDevice(options.device)
    info = device.info
    print(f"{info.name}  {info.uuid}  {format_size(info.total_bytes)}")
    row("torch / RDMA-capable handles", f"{torch.__version__} / {device.rdma_capable}")
    same_context(device)
    start_bytes = device.free_bytes()
    verbs(device)
    growing(device)
    graph(device)
    children(device)
    own_bytes = device.own_bytes()
    row("own_bytes", "unknown here" if own_bytes is None else format_size(own_bytes))
    gc.collect()
    torch.cuda.empty_cache()
    row(
        "free memory lost, kernels and torch's caches",
        format_size(start_bytes - device.free_bytes()),
    )
    device.close()
    try:
        device.create(2 * MIB)
    except DeviceError:
        row("closed")
        return 0
    raise AssertionError("a closed device still works")


if __name__ == "__main__":
    sys.exit(main())
