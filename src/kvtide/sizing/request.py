"""What a plan is asked for: engine, parallel split, dtypes, lengths, and the platform's figures."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import UsageError
from kvtide.sizing.model import Model

__all__ = ["ENGINES", "KV_DTYPES", "PLATFORMS", "Platform", "Request"]

ENGINES = ("vllm", "sglang")
KV_DTYPES = ("auto", "bfloat16", "float16", "fp8")


@dataclass(frozen=True, slots=True)
class Platform:
    """What an engine's attention kernels on a platform ask for; blocks in tokens.

    `batches` are steps in flight at once with pipeline size 1: each may hold a full batch of
    tokens of which a sliding window frees nothing yet.
    """

    block: int
    kernel_multiple: int
    mla_block: int
    mla_block_forced: bool
    batches: int


# vLLM 0.30: FlashAttention takes multiples of 16, FlashMLA 64; the CPU's kernels 32 and, for MLA
# without AMX, 16 whatever the user says. CUDA schedules one step ahead.
PLATFORMS = {
    "cuda": Platform(16, 16, 64, mla_block_forced=False, batches=2),
    "cpu": Platform(128, 32, 16, mla_block_forced=True, batches=1),
}


# Of tokens and sequences: what engines count with 32 bits.
_MOST = (1 << 31) - 1
_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """The figures that decide a plan besides the model and the bytes.

    `max_num_batched_tokens`, `max_num_seqs`: None for the engine's default on the device.
    `block_outermost`: vLLM's layout has all layers of a block side by side (BLNHC, BLHNC).
    `prefix_caching`: hybrids keep one more state a sequence under it.
    `conv_dtype`, `state_dtype`: of convolutions and recurrent matrices, where vLLM was told them
    (`--mamba-cache-dtype`, `--mamba-ssm-cache-dtype`) or chose them for its CPU's kernels.
    """

    engine: str = "vllm"
    tp: int = 1
    pp: int = 1
    kv_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    speculative_tokens: int = 0
    draft: Model | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    block_outermost: bool = False
    platform: str = "cuda"
    conv_dtype: str | None = None
    state_dtype: str | None = None

    def __post_init__(self) -> None:
        choices = (("engine", ENGINES), ("kv_dtype", KV_DTYPES), ("platform", tuple(PLATFORMS)))
        for name, known in choices:
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name} {value!r} is not one of {', '.join(known)}")
        for name in ("tp", "pp"):
            if not 1 <= getattr(self, name) <= _MOST_RANKS:
                raise UsageError(
                    f"{name} is {getattr(self, name)}: it must be from 1 to {_MOST_RANKS}"
                )
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1")
            if value is not None and value > _MOST:
                raise UsageError(f"{name} is {value}: it must be at most {_MOST}")
        if self.speculative_tokens < 0:
            raise UsageError(f"speculative_tokens is {self.speculative_tokens}: at least 0")
        if self.draft is not None and not self.speculative_tokens:
            raise UsageError("a draft model needs the number of speculative tokens")
