"""Stand-in for sgl-kernel's CPU build: torch versions of the few Python names that SGLang imports.

No torch.ops.sgl_kernel.* are there, so every layer takes its native torch path.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__version__ = "0.0.0+cpustub"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = slots[done : done + count].to(req_to_token.dtype)
        done += count


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    into, out_of = targets.tolist(), sources.tolist()
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in out_of]
        for target, row in zip(into, rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: not in the CPU stub")

    missing.__name__ = name
    return missing


# Operators that SGLang binds when it is imported on a CPU; never called on the paths that run here.
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _library.define(f"{_name}(Tensor x) -> Tensor")
