"""Tests only: what SGLang's CPU engine with torch_native does not run as shipped, in torch.

MLA dispatch, LFM2's short convolution, sliding windows, and page sizes above 1. Loaded by SGLang
as a plugin, native servers and those under kvtide alike.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional


def register() -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    handler.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    hook = HookRegistry.register
    hook("sglang.srt.models.lfm2.causal_conv1d_fn", convolve, HookType.REPLACE)
    hook("sglang.srt.models.lfm2.causal_conv1d_update", convolve_one, HookType.REPLACE)
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    hook(f"{backend}._run_sdpa_forward_extend", in_window, HookType.AROUND)
    hook(f"{backend}._run_sdpa_forward_decode", in_window, HookType.AROUND)
    paged = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
    hook(f"{paged}.alloc_extend", alloc_extend, HookType.REPLACE)
    hook(f"{paged}.alloc_decode", alloc_decode, HookType.REPLACE)
    import faults

    faults.register()


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    activation: Any = None,
    **_: Any,
) -> torch.Tensor:
    kept = weight.shape[1] - 1
    out, starts = torch.empty_like(x), query_start_loc.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if end <= start:
            continue
        slot = int(cache_indices[i])
        if bool(has_initial_state[i]):
            head = conv_states[slot][..., -kept:].to(x.dtype)
        else:
            head = torch.zeros(x.shape[0], kept, dtype=x.dtype)
        full = torch.cat([head, x[:, start:end]], 1)
        filters = weight[:, None].to(x.dtype)
        out[:, start:end] = functional.conv1d(full[None], filters, bias, groups=x.shape[0])[0]
        conv_states[slot][..., -kept:] = full[:, -kept:].to(conv_states.dtype)
    return out


def convolve_one(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    conv_state_indices: Any = None,
    **_: Any,
) -> torch.Tensor:
    kept = weight.shape[1] - 1
    head = conv_state[conv_state_indices][..., -kept:].to(x.dtype)
    full = torch.cat([head, x[..., None]], -1)
    out = (full * weight[None].to(x.dtype)).sum(-1)
    if bias is not None:
        out = out + bias
    conv_state[conv_state_indices, :, -kept:] = full[..., 1:].to(conv_state.dtype)
    return out


def in_window(
    original: Any,
    backend: Any,
    query: Any,
    output: Any,
    keys: Any,
    values: Any,
    req_to_token: Any,
    requests: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Shipped, it looks slots of full attention up in the window's buffers."""
    window, pool = kwargs.get("sliding_window_size"), backend.token_to_kv_pool
    if window is not None and window > -1 and "full_to_swa_index_mapping" in vars(pool):
        rows = req_to_token[requests].to(torch.int64)
        req_to_token = pool.translate_loc_from_full_to_swa(rows)
        requests = torch.arange(len(requests))
    return original(backend, query, output, keys, values, req_to_token, requests, *args, **kwargs)


def alloc_extend(
    self: Any,
    prefix_lens: Any,
    prefix_lens_cpu: Any,
    seq_lens: Any,
    seq_lens_cpu: Any,
    last_loc: Any,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Any:
    """Shipped, it is a Triton kernel."""
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
    from sglang.srt.utils.common import get_num_new_pages

    if num_new_pages is None:
        num_new_pages = get_num_new_pages(
            seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
        )
    if num_new_pages > len(self.free_pages):
        self.merge_and_sort_free()
    if num_new_pages > len(self.free_pages):
        return None
    out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
    alloc_extend_naive(
        prefix_lens, seq_lens, last_loc, self.free_pages, out, self.page_size, self.device
    )
    self.free_pages = self.free_pages[num_new_pages:]
    return out


def alloc_decode(self: Any, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
    """Shipped, it is a Triton kernel."""
    begins = seq_lens_cpu % self.page_size == 1
    pages = int(begins.sum())
    if pages > len(self.free_pages):
        self.merge_and_sort_free()
    if pages > len(self.free_pages):
        return None
    out = last_loc.to(torch.int64) + 1
    out[begins] = self.free_pages[:pages] * self.page_size
    self.free_pages = self.free_pages[pages:]
    return out
