"""What kvtide supports of SGLang: everything else is refused by name before memory is taken."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import sglang

from kvtide.errors import UnsupportedError
from kvtide.settings import check_name

__all__ = ["check", "check_scheduler", "default_name"]


class _Refusal(NamedTuple):
    """A field of SGLang's arguments, what it may be, and what is said of anything else."""

    field: str
    allowed: tuple[Any, ...]
    text: str


_OFF = (False, None)
_REFUSED = (
    _Refusal("pp_size", (1,), "pipeline parallelism (--pp-size): its stages schedule apart"),
    _Refusal("dp_size", (1,), "data parallelism (--dp-size): start one server for each replica"),
    _Refusal("nnodes", (1,), "several machines (--nnodes)"),
    _Refusal(
        "disaggregation_mode",
        ("null",),
        "prefill/decode disaggregation (--disaggregation-mode): it registers memory that must "
        "stay mapped",
    ),
    _Refusal(
        "enable_hierarchical_cache",
        _OFF,
        "HiCache (--enable-hierarchical-cache): it copies from memory that must stay mapped",
    ),
    _Refusal("enable_lmcache", _OFF, "LMCache (--enable-lmcache)"),
    _Refusal("enable_flexkv", _OFF, "FlexKV (--enable-flexkv)"),
    _Refusal("enable_hisparse", _OFF, "HiSparse (--enable-hisparse)"),
    _Refusal("enable_unified_memory", _OFF, "the unified memory pool (--enable-unified-memory)"),
    _Refusal(
        "enable_page_major_kv_layout",
        _OFF,
        "the page-major layout (--enable-page-major-kv-layout)",
    ),
    _Refusal("radix_cache_backend", (None, ""), "other radix caches (--radix-cache-backend)"),
    _Refusal(
        "speculative_algorithm",
        (None,),
        "speculative decoding (--speculative-algorithm): its draft model has a pool of its own",
    ),
    _Refusal("enable_pdmux", _OFF, "PD multiplexing (--enable-pdmux)"),
    _Refusal("dcp_size", (1, None), "decode context parallelism (--dcp-size)"),
    _Refusal("attn_cp_size", (1, None), "context parallelism (--attn-cp-size)"),
    _Refusal(
        "enable_unified_cache_external_linker",
        _OFF,
        "an external cache (--enable-unified-cache-external-linker): it registers memory that must "
        "stay mapped",
    ),
    _Refusal("kv_canary", ("none", None), "--kv-canary: it reads slots that may have no memory"),
    _Refusal("use_ray", _OFF, "Ray (--use-ray)"),
)


def check(arguments: Mapping[str, Any]) -> None:
    """Refuse what would break silently.

    Parameters
    ----------
    arguments
        SGLang's, resolved; fields that this version does not have are off in it.

    Raises
    ------
    UnsupportedError
        Names the feature and what is supported.
    """
    for field, allowed, text in _REFUSED:
        if arguments.get(field, allowed[0]) not in allowed:
            raise UnsupportedError(
                f"{text} is not supported by kvtide with SGLang {sglang.__version__}; start "
                "without it, or with KVTIDE=0"
            )
    kv_dtype = str(arguments["kv_cache_dtype"])
    if "fp4" in kv_dtype or "mxfp" in kv_dtype:
        raise UnsupportedError(
            f"--kv-cache-dtype {kv_dtype} keeps its scales in pools of their own, which kvtide "
            "does not support; supported are float and fp8 KV"
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuse pools, allocators and caches of other kinds than those known.

    Raises
    ------
    UnsupportedError
        Names the class.
    """
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    known = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator)
    if type(allocator) not in known:
        raise UnsupportedError(_unknown("allocator", allocator, known))
    trees: tuple[type, ...] = (UnifiedRadixCache,)
    if importlib.util.find_spec("sglang.srt.mem_cache.chunk_cache") is not None:
        # Up to 0.5.22 the cache of servers without a radix tree; later it is the tree, disabled.
        from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache

        trees += (ChunkCache, SWAChunkCache)
    if type(tree) not in trees:
        raise UnsupportedError(_unknown("prefix cache", tree, trees))
    if type(tree) is UnifiedRadixCache and type(tree.tree_core) is not UnifiedTreeCore:
        raise UnsupportedError(_unknown("radix tree", tree.tree_core, (UnifiedTreeCore,)))


def _unknown(what: str, found: object, known: tuple[type, ...]) -> str:
    names = ", ".join(kind.__name__ for kind in known)
    return (
        f"SGLang {sglang.__version__} uses the {what} {type(found).__name__}, which kvtide does "
        f"not know; known are {names}"
    )


def default_name(arguments: Mapping[str, Any]) -> str:
    """`sglang-<served model>`, in characters that a name may have."""
    served = arguments["served_model_name"] or arguments["model_path"]
    # A path serves under its last part: a name has no slashes.
    last = str(served).rstrip("/").rpartition("/")[2]
    return check_name("sglang-" + "".join(c if c.isprintable() and c != " " else "_" for c in last))
