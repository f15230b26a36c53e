"""Loaded into every process of the servers of `bench/contention.py`: counts, and another growth.

`KV_BENCH_COUNTS` names a directory for counts. With `KV_BENCH_SYNCHRONOUS=1` growth goes the way
that is established in the field: admission is in the workers, and before a step the scheduler has
every worker map, by a call that waits for all of them; what is refused is asked for again at once.
`KV_BENCH_DELAY` is in seconds, of every message.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

COUNTS = os.environ.get("KV_BENCH_COUNTS")
SYNCHRONOUS = os.environ.get("KV_BENCH_SYNCHRONOUS") == "1"
DELAY = float(os.environ.get("KV_BENCH_DELAY", "0"))

counts = {"growths": 0, "refusals": 0, "misses": 0, "messages": 0}
executor: Any = None


def save() -> None:
    name = os.environ.get("KVTIDE_NAME", "x")
    path = Path(COUNTS or ".") / f"{name}-{os.getpid()}.json"
    path.write_text(json.dumps(counts))


def patch_growing(module: Any) -> None:
    memory = module.GrowingMemory
    grow_for = memory.grow_for

    def counted(self: Any, blocks: int, desired: int) -> bool:
        coming: bool = grow_for(self, blocks, desired)
        counts["misses"] += not coming
        save()
        return coming

    memory.grow_for = counted
    if SYNCHRONOUS:
        memory._grow = synchronous_grow


def synchronous_grow(self: Any, growths: list[Any], cause: int = 0) -> Any:
    from kvtide.ledger import Refusal
    from kvtide.ranks.places import places

    self.pool.begin_growth(growths)
    of_shape = [places(g.extents, self._granule) for g in growths]
    of_rank = {m.rank: of_shape[m.shape] for m in self.ranks.members}
    for _ in range(2):
        counts["messages"] += len(of_rank)
        done = executor.collective_rpc("bench_map", args=(of_rank,))
        if all(done):
            counts["growths"] += 1
            self.changes.circulate(self.pool.confirm_growth(growths))
            return None
        counts["refusals"] += 1
        if any(done):
            counts["messages"] += len(of_rank)
            executor.collective_rpc("bench_unmap", args=(of_rank, done))
    self.pool.abort_growth(growths)
    save()
    return Refusal("budget", 0, 0, True)


def patch_ranks(module: Any) -> None:
    grant, message = module.Ranks.grant, module.Ranks.message

    def counted_grant(self: Any, bytes_of_shape: Any) -> Any:
        refusal = grant(self, bytes_of_shape)
        counts["refusals" if refusal is not None else "growths"] += 1
        return refusal

    def counted_message(self: Any) -> Any:
        found = message(self)
        counts["messages"] += len(found or ())
        return found

    module.Ranks.grant = counted_grant
    module.Ranks.message = counted_message


def patch_links(module: Any) -> None:
    if not DELAY:
        return
    receive = module.SocketLink.receive

    def delayed(self: Any) -> Any:
        held = self.__dict__.setdefault("held", [])
        now = time.monotonic()
        held += [(now + DELAY, answer) for answer in receive(self)]
        ready = [answer for at, answer in held if at <= now]
        held[:] = [(at, answer) for at, answer in held if at > now]
        return ready

    module.SocketLink.receive = delayed


def patch_worker(module: Any) -> None:
    from kvtide.ledger import Refusal
    from kvtide.ranks.messages import Grow, Shrink

    def bench_map(self: Any, of_rank: dict[int, Any]) -> bool:
        time.sleep(DELAY)
        memory, extents = self.kvtide.memory, of_rank[self.rank]
        size_bytes = sum(size for _, size in extents)
        answer = memory.account.grant(size_bytes)
        done = not isinstance(answer, Refusal)
        if isinstance(answer, Refusal) and answer.sample_is_stale:
            memory.account.sample()
        if done and not memory.carry_out((Grow(0, tuple(map(tuple, extents))),))[0].done:
            memory.account.refund(size_bytes)
            done = False
        time.sleep(DELAY)
        return done

    def bench_unmap(self: Any, of_rank: dict[int, Any], done: list[bool]) -> None:
        time.sleep(2 * DELAY)
        if done[self.rank]:
            memory, extents = self.kvtide.memory, of_rank[self.rank]
            memory.carry_out((Shrink(0, tuple(map(tuple, extents))),))
            memory.account.refund(sum(size for _, size in extents))

    module.ElasticWorker.bench_map = bench_map
    module.ElasticWorker.bench_unmap = bench_unmap
    execute_model = module.ElasticWorker.execute_model

    def delayed(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        message = scheduler_output.__dict__.get("kvtide")
        if DELAY and message is not None and self.rank in message:
            time.sleep(DELAY)
        return execute_model(self, scheduler_output, *args, **kwargs)

    module.ElasticWorker.execute_model = delayed


def patch_introduction(module: Any) -> None:
    introduce = module.introduce

    def introduced(core: Any) -> None:
        global executor
        executor = core.model_executor
        introduce(core)

    module.introduce = introduced


PATCHES = {
    "kvtide.ranks.growing": patch_growing,
    "kvtide.ranks.ranks": patch_ranks,
    "kvtide.ranks.links": patch_links,
    "kvtide.engines.vllm.worker": patch_worker,
    "kvtide.engines.vllm.introduction": patch_introduction,
}


class Finder(importlib.abc.MetaPathFinder):
    """Patches a module right after it has been loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        exec_module = spec.loader.exec_module

        def load(module: Any) -> None:
            exec_module(module)
            patch(module)

        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


if COUNTS:
    sys.meta_path.insert(0, Finder())
