"""Streamed requests to a server and their times: first token, and each one after it."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Timing", "closed_loop", "open_loop"]


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: seconds to the first token, seconds a token after it; or why it failed."""

    ttft_seconds: float
    tpot_seconds: float
    tokens: int
    error: str | None = None


async def _one(url: str, model: str, prompt: Sequence[int], max_tokens: int) -> Timing:
    parts = urllib.parse.urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    start = time.perf_counter()
    first = last = 0.0
    tokens = 0
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        status = await reader.readline()
        if b" 200 " not in status:
            return Timing(0.0, 0.0, 0, status.decode().strip())
        async for line in reader:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                last = time.perf_counter()
                first = first or last
                tokens += 1
        writer.close()
    except OSError as failure:
        return Timing(0.0, 0.0, tokens, str(failure))
    if tokens < 2:
        return Timing(0.0, 0.0, tokens, f"{tokens} tokens came")
    return Timing(first - start, (last - first) / (tokens - 1), tokens)


async def _closed(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int
) -> list[Timing]:
    gate = asyncio.Semaphore(concurrency)

    async def gated(prompt: Sequence[int]) -> Timing:
        async with gate:
            return await _one(url, model, prompt, max_tokens)

    return list(await asyncio.gather(*(gated(prompt) for prompt in prompts)))


async def _open(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, rate: float, seed: int
) -> list[Timing]:
    rng = random.Random(seed)
    running = []
    # By the clock: what this loop is late by does not add up, and all servers have the same times.
    due = time.perf_counter()
    for prompt in prompts:
        await asyncio.sleep(due - time.perf_counter())
        running.append(asyncio.ensure_future(_one(url, model, prompt, max_tokens)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*running))


def closed_loop(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int
) -> tuple[float, list[Timing]]:
    """Seconds for all prompts, so many at a time, and each one's times."""
    start = time.perf_counter()
    timings = asyncio.run(_closed(url, model, prompts, max_tokens, concurrency))
    return time.perf_counter() - start, timings


def open_loop(
    url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int, rate: float, seed: int
) -> list[Timing]:
    """Each one's times, when they arrive at random, `rate` a second on average."""
    return asyncio.run(_open(url, model, prompts, max_tokens, rate, seed))
