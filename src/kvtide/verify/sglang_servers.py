"""Real SGLang servers, started and asked as those of vLLM are."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from kvtide.errors import UsageError
from kvtide.sizing.model import read_model
from kvtide.sizing.plan import make_plan
from kvtide.sizing.request import Request
from kvtide.verify.client import Completion, margins_of, post
from kvtide.verify.servers import Options, Server, free_port

__all__ = ["SGLangServer"]

_HOST = "127.0.0.1"
_TIMEOUT_SECONDS = 600.0
_FLUSH_SECONDS = 30
_ENVIRON = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "all"}
# Of the device under kvtide; natively the size is always given.
_FRACTION = 0.9


class SGLangServer(Server):
    """One `sglang.launch_server` on the CPU, in a session of its own, with all that it starts.

    Parameters are those of `Server`; `python` is the interpreter of the environment with SGLang.
    """

    engine: ClassVar[str] = "sglang"
    distributions: ClassVar[tuple[str, ...]] = ("sglang",)
    backends: ClassVar[tuple[str, ...]] = ("host",)
    lacks: ClassVar[dict[str, str]] = {
        "gemma3": "natively it repeats one token whatever came before: nothing could be compared",
        "deepseek": "MLA: its rotary embedding asserts 'rope_scaling is not None'",
        "qwen3next": "GDN: 'extra_buffer needs CUDA/MUSA/NPU/ROCm/XPU (FLA)'",
        "gptoss": "GptOssForCausalLM 'requires one of' attention backends that need a GPU or AMX",
        "mamba2": "it splits attention heads, which this model has none of: 'NoneType' % int",
    }
    # Once it has shut down, its web server raises the signal that it was ended by again.
    end_mark: ClassVar[str] = "Finished server process"
    end_noise: ClassVar[str] = (
        r"^Traceback \(most recent call last\): (asyncio\.exceptions\.Cancelled|KeyboardInterrupt$)"
    )
    kv_dtypes: ClassVar[dict[str, str]] = {"fp8": "fp8_e4m3"}

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        super().__init__(model, log=log, environ=_ENVIRON | dict(environ or {}), python=python)
        self._command = [
            *(python, "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--host", _HOST, "--port", str(self.port), "--device", "cpu"),
            # The one that it finds by itself is anybody's until its ranks come to use it.
            *("--nccl-port", str(free_port(but=self.port))),
            *("--attention-backend", "torch_native", "--random-seed", "1", *arguments),
        ]

    @classmethod
    def flags(cls, options: Options, model: Path) -> list[str]:
        """SGLang's arguments for these options; a size in bytes becomes one in tokens.

        Raises
        ------
        DoesNotFitError
            The size does not hold one sequence.
        """
        if options.sleep_mode:
            raise UsageError("SGLang has no sleep mode that can be asked for at its start")
        flags = [
            *("--served-model-name", cls.served, "--dtype", options.dtype),
            *("--context-length", str(options.max_model_len), "--sleep-on-idle"),
            *("--kv-cache-dtype", cls.kv_dtypes.get(options.kv_dtype, options.kv_dtype)),
            *("--tp-size", str(options.tp), "--mem-fraction-static", str(_FRACTION)),
        ]
        if options.kv_bytes is not None:
            flags += ["--max-total-tokens", str(_tokens_in(options.kv_bytes, options, model))]
        return flags

    @classmethod
    def environ_for(cls, options: Options, backend: str) -> dict[str, str]:
        """Further variables: each rank computes on a core of its own."""
        cores = "|".join(map(str, range(options.tp)))
        return {"SGLANG_CPU_OMP_THREADS_BIND": cores} if options.tp > 1 else {}

    def ask(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_tokens: int,
        *,
        concurrency: int | None = None,
        margins: bool = False,
    ) -> list[Completion]:
        """Have it continue prompts by so many tokens each, all at once unless told otherwise."""
        with ThreadPoolExecutor(concurrency or max(1, len(prompts))) as pool:
            jobs = [
                pool.submit(self._generate, index, prompt, max_tokens, margins)
                for index, prompt in enumerate(prompts)
            ]
            return [job.result() for job in jobs]

    def _generate(
        self, index: int, prompt: Sequence[int] | str, max_tokens: int, margins: bool
    ) -> Completion:
        asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        wanted = {"return_logprob": True, "top_logprobs_num": 2} if margins else {}
        body = json.dumps({**asked, **wanted, "sampling_params": sampling})
        started = time.monotonic()
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(
            address.hostname or _HOST, address.port, timeout=_TIMEOUT_SECONDS
        )
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return Completion(index, (), f"{error!r}", started, time.monotonic())
        finally:
            connection.close()
        ended = time.monotonic()
        if answer.status != http.client.OK:
            return Completion(index, (), f"status {answer.status}: {text[:200]}", started, ended)
        told = json.loads(text)
        tokens, meta = tuple(told["output_ids"]), told["meta_info"]
        wrong = None
        if len(tokens) != max_tokens:
            wrong = f"{len(tokens)} tokens: {meta['finish_reason']}"
        close = margins_of(_tops(meta["output_top_logprobs"]), tokens) if margins else ()
        return Completion(index, tokens, wrong, started, ended, int(meta["cached_tokens"]), close)

    def drop_cache(self) -> None:
        """Have it forget its prefix cache, once it is idle; an answer other than 200 raises."""
        post(self.url, f"/flush_cache?timeout={_FLUSH_SECONDS}")


def _tokens_in(kv_bytes: int, options: Options, model: Path) -> int:
    """How many tokens SGLang keeps in so many bytes of a rank."""
    request = Request(
        engine=SGLangServer.engine,
        tp=options.tp,
        kv_dtype="fp8" if options.kv_dtype == "fp8" else "auto",
        max_model_len=options.max_model_len,
        platform="cpu",
    )
    return make_plan(read_model(model, dtype=options.dtype), request, kv_bytes).num_tokens


def _tops(places: Sequence[Any]) -> list[dict[int, float]]:
    """For each place the best ids and the logarithms of their probabilities."""
    return [{int(id_): float(value) for value, id_, *_ in best} for best in places]
