"""One in-process vLLM engine that does what it is told, one JSON line a result.

    engine.py '{"system": "kvtide", "model": "dense", "max_num_seqs": 128, ...}' COMMAND...

Commands are JSON lists, from the command line or (with `-`) from stdin, one a line: see `Engine`.
Run it with vLLM and kvtide importable; `drive.py` starts it. Weights are random, strong and the
same for every system, so that tokens depend on the KV cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
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


def write_model(name: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
    return directory


def strengthen(model: Any) -> None:
    """Weights by which every layer, and so the KV cache, bears on the tokens."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator(device=parameter.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            if "norm" in name:
                parameter.fill_(0.0 if "gemma" in type(model).__name__.lower() else 1.0)
            elif parameter.dim() == 2:
                scale = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0, scale, generator=generator)


class Engine:
    """The commands; each answers with a dictionary."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(setup.get("runner", 2) - 1)
        if setup["system"] == "kvtide":
            os.environ["KVTIDE"] = "1"
            os.environ["KVTIDE_NAME"] = setup.get("name", "bench")
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
        start = time.perf_counter()
        self.llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=setup.get("max_model_len", 8192),
            gpu_memory_utilization=setup.get("utilization", 0.6),
            enforce_eager=setup.get("eager", False),
            max_num_seqs=setup.get("max_num_seqs", 128),
            enable_prefix_caching=setup.get("prefix_caching", True),
            seed=42,
            disable_log_stats=False,
        )
        self.start_seconds = time.perf_counter() - start
        self.steps: list[tuple[int, ...]] = []
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
            return output

        scheduler.schedule = schedule

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def started(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        answer = {
            "start_s": round(self.start_seconds, 1),
            "blocks": config.cache_config.num_gpu_blocks,
            "used_mib": self.used_mib(),
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
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) >> 20

    def generate(
        self, name: str, requests: int, prompt: int, output: int, seed: int
    ) -> dict[str, Any]:
        """Greedy tokens of seeded random prompts, all at once."""
        from vllm import SamplingParams

        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, self.vocabulary) for _ in range(prompt)]}
            for _ in range(requests)
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        self.steps.clear()
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
            "steps": len(self.steps),
            "batches": hashlib.sha256(repr(self.steps).encode()).hexdigest()[:12],
            "first": tokens[0][:8],
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
            if self.core.scheduler.has_requests():
                self.core.step_fn()
        return {"used_mib": self.used_mib()}

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

    def growth(self, blocks: int, repeats: int) -> dict[str, Any]:
        """Milliseconds to grow by so many blocks on demand, from idle, and their spread."""
        times = []
        for _ in range(repeats + 1):
            take, give = self._allocator()
            start = time.perf_counter()
            held = take(blocks)
            times.append((time.perf_counter() - start) * 1e3)
            give(held)
            self.idle(0.3)
        times = sorted(times[1:])
        return {"ms_median": times[len(times) // 2], "ms_min": times[0], "ms_max": times[-1]}

    def excess(self, counts: list[int]) -> dict[str, Any]:
        """Device memory beyond what so many blocks need, taken one at a time; and when freed."""
        block_bytes = 2 * 1024 * 1024  # the 8B shape: 16 tokens
        self.idle(1.0)
        base = self._free_bytes()
        take, give = self._allocator()
        rows, held = [], []
        for count in counts:
            while len(held) < count:
                held += take(1)
            mapped = base - self._free_bytes()
            rows.append({"blocks": count, "excess_mib": (mapped - count * block_bytes) / 2**20})
        give(held)
        self.idle(10.0)
        rows.append({"blocks": "10 s after", "excess_mib": (base - self._free_bytes()) / 2**20})
        return {"rows": rows}

    def _free_bytes(self) -> int:
        import torch

        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

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
    lines = sys.stdin if sys.argv[2:] == ["-"] else sys.argv[2:]
    for line in lines:
        command, *arguments = json.loads(line)
        answer = getattr(engine, command)(*arguments)
        print("RESULT", json.dumps({"command": command, **answer}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
