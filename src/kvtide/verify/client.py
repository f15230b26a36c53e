"""Requests to a server's `/v1/completions`, many at once, with their tokens and times."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["Completion", "complete", "margins_of", "metric", "post", "random_prompts"]

_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one request.

    Attributes
    ----------
    index
        The prompt's place among those that were given.
    tokens
        The ids that were generated; empty where it failed.
    error
        None, or why it failed.
    started_seconds, ended_seconds
        On `time.monotonic`'s clock.
    cached_tokens
        Of the prompt, found in the prefix cache; None where the server does not say.
    margins
        Where asked for: of each token the second best id, and by how much (in logarithms of
        probability) the chosen one was better.
    """

    index: int
    tokens: tuple[int, ...]
    error: str | None
    started_seconds: float
    ended_seconds: float
    cached_tokens: int | None = None
    margins: tuple[tuple[int, float], ...] = ()


def complete(
    url: str,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_tokens: int,
    model: str,
    concurrency: int | None = None,
    margins: bool = False,
    on_done: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """Send prompts, texts or token ids, greedily continued by exactly `max_tokens` each.

    Parameters
    ----------
    url
        Of the server, as `Server.url` gives it.
    model
        The name under which it serves the model.
    concurrency
        Requests at one time; all at once where None.
    margins
        Ask also how close the second best token came each time.
    on_done
        Called in the requests' threads as each ends.

    Returns
    -------
    list of Completion
        In the prompts' order. A request that fails is a value too, with its error.
    """

    def one(index: int) -> Completion:
        prompt = prompts[index]
        request: dict[str, Any] = {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if margins:
            request |= {"logprobs": 2, "return_tokens_as_token_ids": True}
        started = time.monotonic()
        tokens: tuple[int, ...] = ()
        error, cached = None, None
        close: tuple[tuple[int, float], ...] = ()
        try:
            answer = json.loads(_exchange("POST", url, "/v1/completions", request))
            choice = answer["choices"][0]
            tokens = tuple(choice["token_ids"])
            details = answer.get("usage", {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens")
            close = margins_of(_tops(choice["logprobs"]), tokens) if margins else ()
            if len(tokens) != max_tokens:
                error = f"{len(tokens)} tokens came, {max_tokens} were asked for"
        except (OSError, http.client.HTTPException) as failure:
            error = f"{type(failure).__name__}: {failure}"
        done = Completion(index, tokens, error, started, time.monotonic(), cached, close)
        if on_done is not None:
            on_done(done)
        return done

    if not prompts:
        return []
    with ThreadPoolExecutor(max_workers=concurrency or len(prompts)) as pool:
        return list(pool.map(one, range(len(prompts))))


def _tops(logprobs: dict[str, Any]) -> list[dict[int, float]]:
    """For each place the best ids and the logarithms of their probabilities."""
    return [
        {int(name.rpartition(":")[2]): value for name, value in top.items()}
        for top in logprobs["top_logprobs"]
    ]


def margins_of(
    tops: Sequence[Mapping[int, float]], tokens: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Of each token the best other one, and how far behind it is; -1 where there is no other.

    Parameters
    ----------
    tops
        For each token the best ids of its place, itself among them, and the logarithms of their
        probabilities.
    tokens
        The ids that were generated.
    """
    found = []
    for token, top in zip(tokens, tops, strict=True):
        by_id = dict(top)
        mine = by_id.pop(token)
        other = max(by_id, key=by_id.__getitem__, default=-1)
        found.append((other, float("inf") if other < 0 else mine - by_id[other]))
    return tuple(found)


def random_prompts(
    seed: int, count: int, tokens: int, *, vocabulary: int = 2048
) -> list[list[int]]:
    """Prompts of random token ids, the same for the same arguments; none holds a special token."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(count)]


def metric(url: str, name: str) -> float:
    """The sum of one of the server's Prometheus counters over its labels.

    Raises
    ------
    KeyError
        The server has no such metric.
    """
    values = [
        float(line.rpartition(" ")[2])
        for line in _exchange("GET", url, "/metrics").decode().splitlines()
        if line.partition("{")[0].partition(" ")[0] == name
    ]
    if not values:
        raise KeyError(name)
    return sum(values)


def post(url: str, path: str) -> None:
    """POST without a body, such as to `/reset_prefix_cache`; an answer other than 200 raises."""
    _exchange("POST", url, path)


def _exchange(method: str, url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(
        place.hostname or "", place.port, timeout=_TIMEOUT_SECONDS
    )
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        text = None if body is None else json.dumps(body)
        connection.request(method, path, body=text, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise http.client.HTTPException(f"status {answer.status}: {content[:300]!r}")
    return content
