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
from typing import ClassVar

from kvtide.errors import UsageError
from kvtide.verify.client import Completion, post
from kvtide.verify.servers import Options, Server

__all__ = ["SGLangServer"]

_HOST = "127.0.0.1"
_TIMEOUT_SECONDS = 600.0
_ENVIRON = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "all"}


class SGLangServer(Server):
    """One `sglang.launch_server` on the CPU, in a session of its own, with all that it starts.

    Parameters are those of `Server`; `python` is the interpreter of the environment with SGLang.
    """

    engine: ClassVar[str] = "sglang"
    distributions: ClassVar[tuple[str, ...]] = ("sglang",)

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
            *("--attention-backend", "torch_native", "--random-seed", "1", *arguments),
        ]

    @classmethod
    def flags(cls, options: Options) -> list[str]:
        """SGLang's arguments for these options."""
        if options.kv_bytes is not None or options.sleep_mode:
            raise UsageError("SGLang takes no KV cache size in bytes, and has no sleep mode")
        return [
            *("--served-model-name", cls.served, "--dtype", options.dtype),
            *("--context-length", str(options.max_model_len)),
            *("--kv-cache-dtype", options.kv_dtype, "--tp-size", str(options.tp)),
        ]

    @classmethod
    def environ_for(cls, options: Options, backend: str) -> dict[str, str]:
        """Further variables: none."""
        return {}

    def ask(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_tokens: int,
        *,
        concurrency: int | None = None,
        margins: bool = False,
    ) -> list[Completion]:
        """Have it continue prompts by so many tokens each, all at once unless told otherwise."""
        if margins:
            raise UsageError("the second best tokens are not asked of SGLang")
        with ThreadPoolExecutor(concurrency or max(1, len(prompts))) as pool:
            jobs = [
                pool.submit(self._generate, index, prompt, max_tokens)
                for index, prompt in enumerate(prompts)
            ]
            return [job.result() for job in jobs]

    def _generate(self, index: int, prompt: Sequence[int] | str, max_tokens: int) -> Completion:
        asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = json.dumps({**asked, "sampling_params": sampling})
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
        return Completion(index, tokens, wrong, started, ended, int(meta["cached_tokens"]))

    def drop_cache(self) -> None:
        """Have it forget its prefix cache; an answer other than 200 raises."""
        post(self.url, "/flush_cache")
