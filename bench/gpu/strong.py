"""What the benchmarks load into vLLM's processes: strong dummy weights, and a look at contexts.

A plugin of vLLM's (`site_of` makes the directory for PYTHONPATH that announces it), so that servers
with workers of their own have it too. With `--load-format dummy` every layer then bears on the
tokens. Where `KV_BENCH_PROBE` names a directory, each process writes down there, once a file `go`
appears in it, on which devices it holds a CUDA context.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

__all__ = ["install", "site_of", "strengthen"]

PROBE = "KV_BENCH_PROBE"


def strengthen(model: Any, salt: int = 0) -> None:
    """Weights by which every layer, and so the KV cache, bears on the tokens."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(zlib.crc32(name.encode()) + salt)
            if "norm" in name:
                parameter.fill_(0.0 if "gemma" in type(model).__name__.lower() else 1.0)
            elif parameter.dim() == 2:
                scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0, scale, generator=generator)


def install() -> None:
    """Called by vLLM in every process that it starts."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    native = DummyModelLoader.load_weights
    if native.__module__ == __name__:
        return

    def load_weights(loader: Any, model: Any, model_config: Any) -> None:
        native(loader, model, model_config)
        strengthen(model, parallel_state.get_tensor_model_parallel_rank())

    DummyModelLoader.load_weights = load_weights
    if PROBE in os.environ:
        threading.Thread(target=_probe, args=(Path(os.environ[PROBE]),), daemon=True).start()


def _probe(directory: Path) -> None:
    while not (directory / "go").exists():
        time.sleep(0.2)
    name = Path("/proc/self/comm").read_text().strip()
    told = {"pid": os.getpid(), "name": name, "contexts": contexts()}
    (directory / f"{os.getpid()}.json").write_text(json.dumps(told))


def contexts() -> list[int]:
    """Devices on which this process has the primary context; asking makes none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    found = []
    flags, active = ctypes.c_uint(), ctypes.c_int()
    for device in range(16):
        # Fails where the driver was not even started in this process, and past the last device.
        if driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)):
            break
        if active.value:
            found.append(device)
    return found


def site_of(directory: Path) -> Path:
    """Announce the plugin from a directory of its own, to be put first in PYTHONPATH."""
    about = directory / "kvtide_bench-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtide-bench\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nbench = strong:install\n")
    return directory
