"""One in-process vLLM engine that does what it is told, one JSON line a result.

    engine.py '{"system": "kvtide", "model": "dense", "max_num_seqs": 128, ...}' COMMAND...

Commands are JSON lists, from the command line or (with `-`) from stdin, one a line: see `Engine`.
Run it with vLLM and kvtide importable; `drive.py` starts it. Weights are random, strong and the
same for every system, so that tokens depend on the KV cache.

The setup's `kv_bytes` is the size of the KV cache (of a native engine all that it holds): vLLM then
takes no memory profile, which fails where neighbours start or end meanwhile. With `cpu` the engine
runs without a GPU, to try scripts: eager, in float32, blocks of 32 tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from drive import spread
from strong import strengthen

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {  # 16 KiB of KV a token: a few thousand tokens fill a small host device
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "head_dim": 128,
        "vocab_size": 2048,
        "torch_dtype": "float32",
    },
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "head_dim": 128,
        "vocab_size": 2048,
    },
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "vocab_size": 32000,
    },
    "window": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "head_dim": 128,
        "vocab_size": 2048,
        "sliding_window": 256,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ]
        * 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 128,
        "rope_local_base_freq": 10000.0,
    },
}
COMMON = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


HOST_KV_BYTES = 256 << 20  # of a native engine without a GPU, where nobody says


def config_of(name: str) -> dict[str, Any]:
    return {**COMMON, **MODELS[name]}


def token_bytes(name: str) -> int:
    """Bytes of KV that one token takes."""
    config = config_of(name)
    element_bytes = 4 if config["torch_dtype"] == "float32" else 2
    elements = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(2 * elements * element_bytes)


def write_model(name: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    # Engines that start at the same time write the same file: whole, or not at all.
    work = directory / f"config-{os.getpid()}"
    work.write_text(json.dumps(config_of(name)))
    work.replace(directory / "config.json")
    return directory


def on_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def device_memory(*, wait: bool = True) -> tuple[int, int]:
    """Free and total bytes: of the GPU, once its work is done; of the machine without one."""
    import torch

    if not on_gpu():
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    if wait:
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def torch_books() -> dict[str, int]:
    """What torch's allocator went through; a retry is where it found the device full."""
    import torch

    if not on_gpu():
        return {}
    told = torch.cuda.memory_stats()
    names = (
        "num_ooms",
        "num_alloc_retries",
        "reserved_bytes.all.peak",
        "reserved_bytes.all.current",
    )
    return {name: int(told.get(name, 0)) for name in names}


class Engine:
    """The commands; each answers with a dictionary."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        host = setup.get("cpu", False)
        if not host:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(setup.get("runner", 2) - 1)
        if setup["system"] == "kvtide":
            os.environ["KVTIDE"] = "1"
            os.environ["KVTIDE_NAME"] = setup.get("name", "bench")
            if "layout" in setup:
                os.environ["KVTIDE_LAYOUT"] = setup["layout"]
        if setup["system"] == "kvcached":
            os.environ["ENABLE_KVCACHED"] = "true"
            os.environ["KVCACHED_AUTOPATCH"] = "1"
            os.environ["KVCACHED_CONTIGUOUS_LAYOUT"] = str(setup.get("contiguous", True)).lower()
            os.environ["KVCACHED_IPC_NAME"] = f"bench{os.getpid()}"
        from vllm import LLM
        from vllm.v1.worker.gpu_worker import Worker

        native_load = Worker.load_model

        def load_model(worker: Any, *args: Any, **kwargs: Any) -> None:
            native_load(worker, *args, **kwargs)
            strengthen(worker.model_runner.get_model())

        Worker.load_model = load_model
        model = write_model(setup["model"], Path(f"/tmp/kvtide-bench/{setup['model']}"))
        kv_bytes = setup.get("kv_bytes")
        if host and kv_bytes is None and setup["system"] == "native":
            kv_bytes = HOST_KV_BYTES
        options = {"block_size": 32, "dtype": "float32"} if host else {}
        start = time.perf_counter()
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=setup.get("max_model_len", 8192),
            gpu_memory_utilization=setup.get("utilization", 0.6),
            kv_cache_memory_bytes=kv_bytes,
            enforce_eager=setup.get("eager", host),
            max_num_seqs=setup.get("max_num_seqs", 128),
            enable_prefix_caching=setup.get("prefix_caching", True),
            seed=42,
            disable_log_stats=False,
            **options,
        )
        self.start_seconds = time.perf_counter() - start
        self.steps: list[tuple[int, ...]] = []
        self.step_times: list[float] = []
        self._trace_steps()
        self.vocabulary = MODELS[setup["model"]]["vocab_size"]

    def _trace_steps(self) -> None:
        """Note how many tokens of each request every step schedules: the batches."""
        scheduler = self.core.scheduler
        native = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = native(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                self.steps.append(tuple(output.num_scheduled_tokens.values()))
                self.step_times.append(time.perf_counter())
            return output

        scheduler.schedule = schedule

    def _clear_steps(self) -> None:
        self.steps.clear()
        self.step_times.clear()

    def _pace(self) -> dict[str, Any]:
        """Of the steps since then: how many, and the milliseconds that one takes of those that
        decode alone, by how many requests they have in 32s, and of the others all together."""
        decoding: dict[int, list[float]] = {}
        rest = 0.0
        pairs = pairwise(self.step_times)
        for step, (began, ended) in zip(self.steps, pairs, strict=False):
            if max(step) == 1:
                decoding.setdefault(len(step) // 32 * 32, []).append((ended - began) * 1e3)
            else:
                rest += (ended - began) * 1e3
        return {
            "steps": len(self.steps),
            "requests_a_step": round(sum(map(len, self.steps)) / max(1, len(self.steps)), 1),
            "tokens_scheduled": sum(map(sum, self.steps)),
            "decoding_ms": {
                str(at_least): {"steps": len(ms), **spread(ms), "sum": round(sum(ms), 1)}
                for at_least, ms in sorted(decoding.items())
            },
            "prefilling_ms": round(rest, 1),
        }

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def started(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        answer = {
            "start_s": round(self.start_seconds, 1),
            "blocks": config.cache_config.num_gpu_blocks,
            "tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "used_mib": self.used_mib(),
            "total_bytes": device_memory()[1],
            "asynchronous": config.scheduler_config.async_scheduling,
            "runner": "v2"
            if self.core.model_executor.driver_worker.worker.use_v2_model_runner
            else "v1",
        }
        if self.setup["system"] == "kvtide":
            endpoint = self.core.model_executor.driver_worker.worker.kvtide
            answer["layout"] = endpoint._layout
        return answer

    def used_mib(self) -> int:
        free, total = device_memory()
        return (total - free) >> 20

    def _prompts(self, requests: int, prompt: int, seed: int) -> list[dict[str, list[int]]]:
        rng = random.Random(seed)
        return [
            {"prompt_token_ids": [rng.randrange(10, self.vocabulary) for _ in range(prompt)]}
            for _ in range(requests)
        ]

    def generate(
        self, name: str, requests: int, prompt: int, output: int, seed: int
    ) -> dict[str, Any]:
        """Greedy tokens of seeded random prompts, all at once."""
        from vllm import SamplingParams

        prompts = self._prompts(requests, prompt, seed)
        sampling = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        self._clear_steps()
        preempted = self.preemptions()["preemptions"]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        digest = [hashlib.sha256(json.dumps(t).encode()).hexdigest()[:12] for t in tokens]
        return {
            "name": name,
            "seconds": round(seconds, 4),
            "tokens_per_s": round(requests * output / seconds, 1),
            "digests": digest,
            "distinct": len(set(digest)),
            "used_mib": self.used_mib(),
            **self._pace(),
            "preemptions": self.preemptions()["preemptions"] - preempted,
            "batches": hashlib.sha256(repr(self.steps).encode()).hexdigest()[:12],
            "first": tokens[0][:8],
        }

    def burst(
        self, name: str, requests: int, prompt: int, output: int, seed: int
    ) -> dict[str, Any]:
        """Requests that come all at once: milliseconds until each one's first token.

        From vLLM's record of each request: when its core had the first token, on the monotonic
        clock of this process, by which the burst began too.
        """
        from vllm import SamplingParams

        prompts = self._prompts(requests, prompt, seed)
        sampling = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        preempted = self.preemptions()["preemptions"]
        self._clear_steps()
        began = time.monotonic()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        ended = time.monotonic()
        return {
            "name": name,
            "began": round(began, 3),
            "ended": round(ended, 3),
            "complete": sum(len(o.outputs[0].token_ids) == output for o in outputs),
            "ttft_ms": [round((o.metrics.first_token_ts - began) * 1e3, 2) for o in outputs],
            "cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs),
            "preemptions": self.preemptions()["preemptions"] - preempted,
            **self._pace(),
        }

    def load(
        self,
        until: str,
        at_once: int,
        prompts: Sequence[int],
        output: int,
        seed: int,
        seconds: float,
        logprobs_every: int = 0,
    ) -> dict[str, Any]:
        """Keep so many requests there, of these lengths in turn, until a file is or time is over.

        With `logprobs_every` each such request wants its prompt's logprobs too, which takes logits
        for every token. What is unfinished at the end is aborted, and no failure.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, scheduler = self.llm.llm_engine, self.core.scheduler
        rng = random.Random(seed)
        vocabulary = range(10, self.vocabulary)
        preempted = self.preemptions()["preemptions"]
        open_: set[str] = set()
        sent = finished = short = with_logprobs = lacking = steps = running = used = mapped = 0
        lowest_bytes = device_memory()[0]
        began = time.monotonic()
        while time.monotonic() - began < seconds and not Path(until).exists():
            while len(open_) < at_once:
                wants = logprobs_every > 0 and sent % logprobs_every == 0
                name = f"load-{seed}-{sent}{'-logprobs' if wants else ''}"
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=output,
                    ignore_eos=True,
                    detokenize=False,
                    prompt_logprobs=1 if wants else None,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                tokens = rng.choices(vocabulary, k=prompts[sent % len(prompts)])
                engine.add_request(name, {"type": "token", "prompt_token_ids": tokens}, sampling)
                open_.add(name)
                sent += 1
            for answer in engine.step():
                if not answer.finished:
                    continue
                open_.discard(answer.request_id)
                finished += 1
                short += len(answer.outputs[0].token_ids) != output
                if answer.request_id.endswith("-logprobs"):
                    with_logprobs += 1
                    told = answer.prompt_logprobs
                    lacking += told is None or len(told) != len(answer.prompt_token_ids)
            steps += 1
            running = max(running, len(scheduler.running))
            lowest_bytes = min(lowest_bytes, device_memory(wait=False)[0])
            if self.setup["system"] == "kvtide":
                used = max(used, scheduler.tide.memory.used_count)
                mapped = max(mapped, scheduler.tide.memory.pool.mapped_bytes)
        took = time.monotonic() - began
        engine.abort_request(list(open_))
        while engine.has_unfinished_requests():
            engine.step()
        return {
            "seconds": round(took, 2),
            "sent": sent,
            "finished": finished,
            "failed": short + lacking,
            "with_prompt_logprobs": with_logprobs,
            "aborted_at_the_end": len(open_),
            "steps": steps,
            "most_running": running,
            "most_used_blocks": used,
            "most_mapped_mib": mapped >> 20,
            "lowest_free_mib": lowest_bytes >> 20,
            "preemptions": self.preemptions()["preemptions"] - preempted,
            "torch": torch_books(),
        }

    def reset(self) -> dict[str, Any]:
        """Forget the prefix cache; memory after at most two steps."""
        done = self.llm.reset_prefix_cache()
        for _ in range(2):
            self.core.step_fn()
        return {"done": done, "used_mib": self.used_mib()}

    def idle(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.05)
            self._attend()
            if self.setup["system"] == "kvcached":  # it lets pages go behind a step alone
                self.core.step_fn()
        return {"used_mib": self.used_mib()}

    def _attend(self) -> None:
        """A step without requests, where a server's core would take one: a neighbour asks, memory
        is to go, or the last batch of those scheduled ahead is still in flight."""
        if self.core.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()

    def listen(self) -> Iterator[str]:
        """Lines of stdin; between them the engine does what a server's core does when idle."""
        waiting = b""
        while True:
            line, end, rest = waiting.partition(b"\n")
            if end:
                waiting = rest
                yield line.decode()
            elif select.select([0], [], [], 0.001)[0]:
                read = os.read(0, 65536)
                if not read:
                    return
                waiting += read
            else:
                self._attend()

    def zeroing(self, on: bool) -> dict[str, Any]:
        """Negative control: all of the KV cache is zeroed before each step."""
        worker = self.core.model_executor.driver_worker.worker
        runner, native = worker.model_runner, type(worker.model_runner).execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            endpoint = worker.kvtide
            memory = endpoint.memory
            base = memory.arena.address
            memory.device.zero([(base + offset, size) for offset, size in memory.places])
            return native(runner, *args, **kwargs)

        if on:
            runner.execute_model = execute_model
        else:
            del runner.execute_model
        return {"on": on}

    def figures(self) -> dict[str, Any]:
        if self.setup["system"] != "kvtide":
            return {}
        tide = self.core.scheduler.tide
        memory = tide.memory
        ledger = next(iter(memory.seats.values())).ledger
        snapshot = ledger.snapshot()
        return {
            "usable": memory.pool.usable_count,
            "used": memory.used_count,
            "cached": memory.circulation.cached_count,
            "mapped_mib": memory.pool.mapped_bytes >> 20,
            "extents": len(memory.pool.shapes[0].mapped),
            "refusals": memory.refusals,
            "budget_mib": snapshot.budget_bytes >> 20,
            "charged_mib": sum(i.charged_bytes for i in snapshot.instances) >> 20,
        }

    def ceiling(self) -> dict[str, Any]:
        """What this engine may hold of KV cache when alone, as its ledger has it."""
        memory = self.core.scheduler.tide.memory
        seat = next(iter(memory.seats.values()))
        snapshot = seat.ledger.snapshot()
        own = next(i for i in snapshot.instances if i.name == seat.instance.name)
        pool = own.pools[0]
        blocks = min(
            (snapshot.budget_bytes - snapshot.withheld_bytes) // pool.block_bytes, pool.blocks_total
        )
        return {
            "tokens": blocks * self.llm.llm_engine.vllm_config.cache_config.block_size,
            "blocks": blocks,
            "block_bytes": pool.block_bytes,
            "budget_mib": snapshot.budget_bytes >> 20,
            "withheld_mib": snapshot.withheld_bytes >> 20,
            "headroom_mib": own.terms.headroom_bytes >> 20,
            "margin_mib": snapshot.spec.margin_bytes >> 20,
            "own_mib": own.non_kv_bytes >> 20,
            "own_source": own.non_kv_source,
        }

    def growth(self, blocks: int, repeats: int) -> dict[str, Any]:
        """Milliseconds to grow by so many blocks on demand, one growth right after the other."""
        take, give = self._allocator()
        self.idle(1.0)
        times, held = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            taken = take(blocks)
            times.append((time.perf_counter() - start) * 1e3)
            held.append(taken)
        for taken in held:
            give(taken)
        self.idle(0.5)
        ordered = sorted(times)
        return {
            "ms": [round(t, 3) for t in times],
            "ms_median": ordered[len(ordered) // 2],
            "ms_min": ordered[0],
            "ms_max": ordered[-1],
        }

    def excess(self, counts: list[int]) -> dict[str, Any]:
        """Device memory beyond what so many blocks need, taken one at a time; and when freed.

        By the driver, from what the system itself says it has mapped before the first one.
        """
        block_bytes = 2 * 1024 * 1024  # the 8B shape: 16 tokens
        self.idle(1.0)
        base = self._free_bytes() + self._mapped_bytes()
        take, give = self._allocator()
        rows: list[dict[str, Any]] = []
        held: list[Any] = []
        for count in counts:
            while len(held) < count:
                held += take(1)
            mapped = base - self._free_bytes()
            rows.append({"blocks": count, "excess_mib": (mapped - count * block_bytes) / 2**20})
        give(held)
        self.idle(10.0)
        rows.append({"blocks": "10 s after", "excess_mib": (base - self._free_bytes()) / 2**20})
        return {"rows": rows}

    def mapped(self) -> dict[str, Any]:
        """Bytes that the system itself says it has mapped for KV, and those of the device."""
        return {"mapped_bytes": self._mapped_bytes(), "total_bytes": device_memory()[1]}

    def _mapped_bytes(self) -> int:
        """What is mapped for KV now, a reserve included, as the system itself counts it."""
        if self.setup["system"] == "kvcached":
            manager = self.core.scheduler.kv_cache_manager.block_pool.kv_cache_manager
            pages = manager.page_allocator
            count = pages.get_num_inuse_pages() + pages.get_num_reserved_pages()
            return int(count * manager.page_size * manager.num_layers * manager.num_kv_buffers)
        return int(self.core.scheduler.tide.memory.pool.mapped_bytes)

    def _free_bytes(self) -> int:
        return device_memory()[0]

    def _allocator(self) -> tuple[Any, Any]:
        """How the system's own pool takes and gives back blocks, growing on demand."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        if self.setup["system"] == "kvcached":
            return pool.kv_cache_manager.alloc, pool.kv_cache_manager.free
        memory = self.core.scheduler.tide.memory

        def take(count: int) -> Any:
            missing = count - pool.free.count
            if missing > 0:
                done = memory.grow(missing) if count == 1 else memory.grow_for(missing, missing)
                assert done
            return pool.get_new_blocks(count)

        def give(blocks: Any) -> None:
            pool.free_blocks(blocks)
            memory.trim()

        return take, give

    def count_changes(self) -> dict[str, Any]:
        """Count the arena's changes from here on."""
        arena = self.core.model_executor.driver_worker.worker.kvtide.memory.arena
        self.counts = {"grow": 0, "shrink": 0, "split": 0}
        for name in self.counts:
            setattr(arena, name, self._counted(name, getattr(arena, name)))
        return {}

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            answer = call(*args)
            self.counts[name] += answer is not False
            return answer

        return counted

    def changes(self) -> dict[str, Any]:
        return dict(self.counts)

    def preemptions(self) -> dict[str, Any]:
        total = sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")
        return {"preemptions": total}

    def wait_for(self, path: str) -> dict[str, Any]:
        """Wait until a file is there: how several engines keep step."""
        while not Path(path).exists():
            time.sleep(0.01)
        return {}

    def touch(self, path: str) -> dict[str, Any]:
        Path(path).touch()
        return {}


def main() -> int:
    engine = Engine(json.loads(sys.argv[1]))
    print("RESULT", json.dumps({"command": "started", **engine.started()}), flush=True)
    lines = engine.listen() if sys.argv[2:] == ["-"] else sys.argv[2:]
    for line in lines:
        command, *arguments = json.loads(line)
        answer = getattr(engine, command)(*arguments)
        print("RESULT", json.dumps({"command": command, **answer}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
