"""A limit on a running engine: idle memory above it goes, it holds under load, can be raised."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from kvtide.errors import KvtideError
from kvtide.units import MIB, format_size
from kvtide.verify.answers import Answer, all_answered, recorded, tokens_equal
from kvtide.verify.client import random_prompts
from kvtide.verify.life import Life, drop_cache, end_checks, lived, ready_check
from kvtide.verify.pair_case import PROBE_TOKENS, Watched, load_for
from kvtide.verify.servers import Server
from kvtide.verify.site import Site, until
from kvtide.verify.texts import probe_prompt
from kvtide.verify.verdict import Check

__all__ = ["LimitRecord", "judge_limit", "run_limit"]

_SHORT, _SHORT_TOKENS = 100, 48
_LONG, _LONG_TOKENS = 4, 600
_ALLOWED_SECONDS = 30.0
_GRANULARITY_BYTES = 2 * MIB


class LimitRecord(msgspec.Struct):
    """What was seen; sizes in bytes charged to the engine.

    Attributes
    ----------
    idle, filled, limit, refilled
        Before its load, after it, the limit, and after the same load without a limit again.
    in_force
        The limit as the ledger had it; None where it could not be set.
    released_seconds
        From setting the limit until the charge was below it; None if never.
    peak
        The most under the limit, while requests ran.
    """

    life: Life
    idle: int = 0
    filled: int = 0
    limit: int = 0
    in_force: int | None = None
    released_seconds: float | None = None
    peak: int = 0
    refilled: int = 0
    requests: tuple[Answer, ...] = ()
    refill: tuple[Answer, ...] = ()
    probes: tuple[tuple[Answer, ...], tuple[Answer, ...]] = ((), ())
    error: str | None = None


def run_limit(site: Site, name: str, server: Server, say: Callable[[str], None]) -> LimitRecord:
    """Fill, lower, load, raise, fill again."""
    with lived(site, server, name, native=False) as life:
        record = LimitRecord(life)
        if not life.ready:
            return record
        probe = recorded(server.ask([probe_prompt()], PROBE_TOKENS))
        say("filling its cache")
        load, _ = load_for(site, server, name, 5)
        record.idle = site.charge(name)
        record.refill = Watched(site).ask([(server, load)])[0]
        record.filled = site.charge(name)
        quarter = (record.filled - record.idle) // 4
        record.limit = record.idle + quarter // _GRANULARITY_BYTES * _GRANULARITY_BYTES
        say(f"a limit of {format_size(record.limit)}")
        started = time.monotonic()
        try:
            site.set_limit(name, record.limit)
        except KvtideError as error:
            record.error = str(error)
            return record
        instance = site.instance(name)
        record.in_force = None if instance is None else instance.limit_bytes
        if until(lambda: site.charge(name) <= record.limit, _ALLOWED_SECONDS) is not None:
            record.released_seconds = time.monotonic() - started
        say(f"{_SHORT} short and {_LONG} long requests under it")
        under = Watched(site)
        prompts = random_prompts(6, _SHORT, _SHORT_TOKENS) + random_prompts(7, _LONG, _LONG_TOKENS)
        record.requests = under.ask([(server, prompts)])[0]
        record.peak = under.peaks.get(name, 0)
        say("the limit is lifted, and its cache filled again")
        site.set_limit(name, None)
        record.refill += Watched(site).ask([(server, load)])[0]
        record.refilled = site.charge(name)
        drop_cache(server, life)
        record.probes = (probe, recorded(server.ask([probe_prompt()], PROBE_TOKENS)))
    return record


def judge_limit(record: LimitRecord, *, exact: bool = True) -> list[tuple[str, Check]]:
    """What must hold of an engine under a limit."""
    life = record.life
    checks = [ready_check(life)]
    if life.ready:
        checks += _limit_checks(record, exact)
    checks += [
        c._replace(title="alive") if c.title == "server_alive_after_load" else c
        for c in end_checks(life)
    ]
    return [(life.name, check) for check in checks]


def _limit_checks(record: LimitRecord, exact: bool) -> list[Check]:
    fill = record.filled - record.idle
    took = record.released_seconds
    return [
        Check(
            "limit_set",
            record.in_force == record.limit > 0,
            record.error or f"{format_size(record.in_force or 0)} in the ledger",
        ),
        Check(
            "limit_cache_filled",
            fill >= 4 * _GRANULARITY_BYTES and all(a.error is None for a in record.refill),
            f"{format_size(record.idle)} idle, {format_size(record.filled)} filled",
        ),
        Check(
            "limit_released_idle",
            took is not None and took <= _ALLOWED_SECONDS,
            f"above it after {_ALLOWED_SECONDS:.0f} s" if took is None else f"in {took:.2f} s",
        ),
        all_answered("limit_requests_ok", record.requests),
        Check(
            "limit_held_under_load",
            0 < record.peak <= record.limit,
            f"peak {format_size(record.peak)} of {format_size(record.limit)}",
        ),
        Check(
            "limit_raised_regrows",
            record.refilled - record.idle > fill / 2,
            f"{format_size(record.refilled)}, {format_size(record.filled)} before",
        ),
        tokens_equal("probe_unchanged", *record.probes, exact=exact),
    ]
