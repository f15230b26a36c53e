"""Loaded by sglshim.pth when the interpreter starts: no torch is imported here.

PyPI's torchvision is the CUDA build: its library does not load beside a CPU torch, and its
registrations then miss the schemas of operators.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from typing import Any


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        with contextlib.suppress(RuntimeError):
            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            # Kept: with it the definitions would go.
            sys._kvtide_torchvision_library = library  # type: ignore[attr-defined]


sys.meta_path.insert(0, _BeforeTorchvision())
