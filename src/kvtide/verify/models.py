"""Tiny models with random weights, made on the spot: no download, the same bytes every time.

`python -m kvtide.verify.models KIND DIRECTORY` makes one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.errors import UsageError

__all__ = ["DTYPES", "KINDS", "VOCABULARY", "dtype_of", "ensure_model", "make_model"]

VOCABULARY = 2048
DTYPES = ("float32", "bfloat16")

_SPECIAL = ("<s>", "</s>", "<pad>")
_TRAINING_FILES = 120
_SEED = 1  # with it no kind falls into repeating one token

# Weights far stronger than a trained model's start: attention then decides the next token, so
# that tokens show when a KV cache holds something else than it should.
_STRENGTH = 0.2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": _STRENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


class _Kind(NamedTuple):
    architecture: str  # as transformers names it
    differences: dict[str, Any]  # from `_COMMON`
    without: tuple[str, ...] = ()  # of `_COMMON`
    dtype: str = "float32"  # bfloat16 where vLLM's CPU kernels take nothing else
    head_spread: float = 0.0  # see `_spread_head`
    gpu_dtype: str | None = None  # where vLLM's GPU kernels do not take the other one


_GEMMA3: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    # DeepSeek's own: prefill on a GPU has kernels for no others.
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    **_EXPERTS,
}

_KINDS = {
    "llama": _Kind("llama", {}),
    # 16 KiB of KV a token in float32: a few thousand tokens fill a small device.
    "llama-wide": _Kind(
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
    ),
    "qwen2": _Kind("qwen2", {}),
    "gemma3": _Kind("gemma3_text", _GEMMA3),
    # SGLang keeps the windows of a model that says so in a pool of their own.
    "cohere2": _Kind(
        "cohere2",
        {**_GEMMA3, "is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 1, 0]},
        without=("tie_word_embeddings",),
    ),
    "lfm2": _Kind(
        "lfm2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "hidden_size": 256,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        },
    ),
    "qwen3next": _Kind(
        "qwen3_next",
        {
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            # Both experts always: a router that rounds to another expert changes every token after.
            "num_experts": 2,
            "initializer_range": 0.03,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            **_EXPERTS,
        },
        dtype="bfloat16",
        head_spread=1.5,
    ),
    "mamba2": _Kind(
        "mamba2",
        {
            "state_size": 32,
            "num_heads": 8,
            "n_groups": 1,
            "expand": 2,
        },
        without=(
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ),
    ),
    # No attention backend for MLA on a GPU computes in float32.
    "deepseek": _Kind("deepseek_v2", _DEEPSEEK, without=("head_dim",), gpu_dtype="bfloat16"),
    # What SGLang's CPU engine runs: no experts, and positions stretched as DeepSeek's own are.
    "deepseek-dense": _Kind(
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "first_k_dense_replace": 4,
            "moe_layer_freq": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        without=("head_dim",),
    ),
    "gptoss": _Kind(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        dtype="bfloat16",
        head_spread=1.5,
    ),
}

KINDS = tuple(_KINDS)


def dtype_of(kind: str, backend: str = "host") -> str:
    """The dtype in which a kind's greedy tokens are the same however requests are batched.

    Of those that the engines compute in on a backend, `host` or `cuda`. Serve with `--dtype` and
    this: vLLM's own choice is 16 bits wide even for float32 weights.
    """
    on_gpu = _KINDS[kind].gpu_dtype if backend == "cuda" else None
    return on_gpu or _KINDS[kind].dtype


def make_model(kind: str, directory: Path, *, dtype: str | None = None, seed: int = _SEED) -> Path:
    """Write a model and its tokenizer into a new or empty directory.

    Needs torch and transformers. The directory appears whole or not at all.

    Parameters
    ----------
    kind
        One of `KINDS`.
    directory
        Where to; its parents are made.
    dtype
        One of `DTYPES`, of the weights; `dtype_of` the kind where None.
    seed
        Of the weights; the same seed gives the same bytes.

    Raises
    ------
    UsageError
        The kind or dtype is not known, or the directory holds something already.
    """
    if kind not in _KINDS:
        raise UsageError(f"{kind!r} is not a kind of model; there are {', '.join(KINDS)}")
    dtype = dtype or dtype_of(kind)
    if dtype not in DTYPES:
        raise UsageError(f"{dtype!r} is not a dtype of these models: {' or '.join(DTYPES)}")
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: name a new directory for the model")
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_tokenizer(work)
        _write_weights(kind, work, dtype, seed)
        work.replace(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def ensure_model(kind: str, cache: Path, *, dtype: str | None = None, seed: int = _SEED) -> Path:
    """The model of this kind in a cache directory, made there if it is not there yet."""
    dtype = dtype or dtype_of(kind)
    directory = cache / f"{kind}-{dtype}-{seed}"
    if not (directory / "config.json").exists():
        make_model(kind, directory, dtype=dtype, seed=seed)
    return directory


def _write_weights(kind: str, directory: Path, dtype: str, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    architecture, differences, without, _, spread, _ = _KINDS[kind]
    values = {k: v for k, v in (_COMMON | differences).items() if k not in without}
    config = AutoConfig.for_model(architecture, dtype=dtype, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        if spread:
            _spread_head(model, spread)
    model.to(getattr(torch, dtype)).save_pretrained(directory)


def _spread_head(model: Any, spread: float) -> None:
    """Give the output's rows very different lengths, so that the best token wins by far.

    With rows of one length some 1% of the choices are within the rounding of bfloat16, and
    another batch then gives another token.
    """
    import torch

    with torch.no_grad():
        rows = model.lm_head.weight
        rows.mul_(torch.exp(spread * torch.randn(rows.shape[0], 1)))


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(os.__file__).parent  # Python's own library is text that every machine has
    tokenizer.train([str(p) for p in sorted(library.glob("*.py"))[:_TRAINING_FILES]], trainer)
    bos, eos, pad = _SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    ).save_pretrained(directory)


def main(arguments: list[str] | None = None) -> int:
    """Make one model from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtide.verify.models", description="Make a tiny model with random weights."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=_SEED)
    given = parser.parse_args(arguments)
    try:
        make_model(given.kind, given.directory, dtype=given.dtype, seed=given.seed)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
