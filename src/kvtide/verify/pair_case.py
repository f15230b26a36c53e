"""Two engines on one device: what one filled and no longer needs is the other's.

Where a has a second rank, on a device that it has alone, the two ranks stay in step.
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvtide.units import format_size
from kvtide.verify.answers import Answer, all_answered, recorded, tokens_equal
from kvtide.verify.client import random_prompts
from kvtide.verify.life import Life, drop_cache, end_checks, lived
from kvtide.verify.servers import Options, Server
from kvtide.verify.site import Site, until
from kvtide.verify.texts import probe_prompt
from kvtide.verify.verdict import Check

__all__ = ["PairRecord", "Player", "Watched", "judge_pair", "load_for", "run_pair"]

PROMPT_TOKENS = 448
NEW_TOKENS = 64
PROBE_TOKENS = 32
SHARE = 0.7  # of the memory that a load is made for
AT_ONCE = 16
_RELEASE_SECONDS = 30.0
_SETTLE_SECONDS = 2.0

# A server of a pair: its class, how to start it, and its name in the ledger.
Player = tuple[str, Server, Options]


class PairRecord(msgspec.Struct):
    """What was seen of a pair; sizes in bytes of the device that they share.

    Attributes
    ----------
    request_bytes
        What one request holds, of a and of b.
    free_before, free_at_peak
        What could be granted before a was loaded, and when a held most.
    a_before, a_peak, a_after
        Charged to a before its load, at most, and after its cache was dropped.
    b_peak
        The most that b was charged while it alone was loaded.
    charges
        Of a on each of its devices, after each load.
    least_free
        Of each device while both were loaded, first the one that they share.
    """

    lives: tuple[Life, Life]
    request_bytes: tuple[int, int] = (0, 0)
    free_before: int = 0
    free_at_peak: int = 0
    a_before: int = 0
    a_peak: int = 0
    a_after: int = 0
    released_seconds: float | None = None
    b_before: int = 0
    b_peak: int = 0
    requests: dict[str, tuple[Answer, ...]] = {}
    probes: dict[str, tuple[tuple[Answer, ...], tuple[Answer, ...]]] = {}
    over_budget: int = 0
    samples: int = 0
    charges: tuple[tuple[int, ...], ...] = ()
    least_free: tuple[int, ...] = ()


class Watched:
    """Looks at a device while requests run: the most that each instance is charged."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.peaks: dict[str, int] = {}
        self.free_at_peak: dict[str, int] = {}
        self.samples = 0
        self.over_budget = 0
        self.least_free: list[int] = []

    def ask(
        self, asked: Sequence[tuple[Server, Sequence[Sequence[int]]]], *, at_once: int = AT_ONCE
    ) -> list[tuple[Answer, ...]]:
        """Give each server its prompts, all servers together; their answers."""
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            running = [
                pool.submit(server.ask, prompts, NEW_TOKENS, concurrency=at_once)
                for server, prompts in asked
            ]
            # What it is after a load is a peak too, so one more look after the last has ended.
            while not all(r.done() for r in running):
                self._look()
                until(lambda: all(r.done() for r in running), 0.05)
            self._look()
            return [recorded(r.result()) for r in running]

    def _look(self) -> None:
        snapshots = self._site.snapshots()
        if not snapshots:
            return
        self.samples += 1
        # Not the published budget: a measurement that falls into a release finds that memory
        # neither held nor free, and lowers the budget below what is rightly charged.
        self.over_budget += any(s.charged_bytes > s.spec.ceiling_bytes for s in snapshots)
        free = [s.free_bytes for s in snapshots]
        self.least_free = list(map(min, self.least_free or free, free))
        snapshot = snapshots[0]
        for instance in snapshot.instances:
            if instance.charged_bytes > self.peaks.get(instance.name, -1):
                self.peaks[instance.name] = instance.charged_bytes
                self.free_at_peak[instance.name] = snapshot.free_bytes


def load_for(site: Site, server: Server, name: str, seed: int) -> tuple[list[list[int]], int]:
    """Prompts that fill 70% of what there is for them, and what one of them holds, as measured.

    That is the free memory, and what the engine holds with nothing in it: SGLang's least may be a
    quarter of what is free.
    """
    _forget(server)
    until(lambda: False, _SETTLE_SECONDS)
    before = site.charge(name)
    first = random_prompts(seed, 4, PROMPT_TOKENS)
    server.ask(first, NEW_TOKENS, concurrency=1)
    until(lambda: False, _SETTLE_SECONDS)
    instance = site.instance(name)
    cached = 0
    if instance is not None:
        cached = sum(p.figures.blocks_cached * p.block_bytes for p in instance.pools)
    # By what is cached, where it tells: the charge has in it what was grown ahead.
    one_bytes = max(cached or site.charge(name) - before, 1) // len(first)
    _forget(server)
    until(lambda: site.charge(name) <= before, _RELEASE_SECONDS)
    room_bytes = site.free_bytes() + site.charge(name)
    count = max(4, round(SHARE * room_bytes / max(one_bytes, 1)))
    return random_prompts(seed + 50, count, PROMPT_TOKENS), one_bytes


def _in_step(site: Site, name: str) -> tuple[int, ...]:
    """An instance's charge on each device; once they are equal, if they come to be."""
    charges: list[int] = []

    def equal() -> bool:
        charges[:] = [i.charged_bytes for i in site.instances(name)]
        return len(set(charges)) == 1

    until(equal, _SETTLE_SECONDS)
    return tuple(charges)


def _forget(server: Server) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.drop_cache()


def run_pair(
    site: Site, servers: Sequence[tuple[str, Server]], say: Callable[[str], None]
) -> PairRecord:
    """a alone, a's cache dropped, b alone, both."""
    (name_a, a), (name_b, b) = servers
    with contextlib.ExitStack() as stack:
        for _, server in servers:
            stack.enter_context(server)  # both start at once: most of that is one thread's work
        life_a = stack.enter_context(lived(site, a, name_a, native=False))
        life_b = stack.enter_context(lived(site, b, name_b, native=False))
        record = PairRecord((life_a, life_b))
        if not (life_a.ready and life_b.ready):
            return record
        probes = {n: recorded(s.ask([probe_prompt()], PROBE_TOKENS)) for n, s in servers}
        say("what one request holds")
        load_a, one_a = load_for(site, a, name_a, 1)
        load_b, one_b = load_for(site, b, name_b, 2)
        record.request_bytes = (one_a, one_b)
        record.free_before, record.a_before = site.free_bytes(), site.charge(name_a)
        say(f"a alone: {len(load_a)} requests")
        alone = Watched(site)
        record.requests["a_alone"] = alone.ask([(a, load_a)])[0]
        record.charges = (_in_step(site, name_a),)
        record.a_peak = alone.peaks.get(name_a, 0)
        record.free_at_peak = alone.free_at_peak.get(name_a, 0)
        say("a's cache is dropped")
        drop_cache(a, life_a)
        half = record.a_before + (record.a_peak - record.a_before) // 2
        record.released_seconds = until(lambda: site.charge(name_a) < half, _RELEASE_SECONDS)
        record.a_after, record.b_before = site.charge(name_a), site.charge(name_b)
        say(f"b alone: {len(load_b)} requests")
        other = Watched(site)
        record.requests["b_alone"] = other.ask([(b, load_b)])[0]
        record.b_peak = other.peaks.get(name_b, 0)
        say("both at once")
        both = Watched(site)
        answers = both.ask([(a, load_a), (b, load_b)])
        record.requests["both_a"], record.requests["both_b"] = answers
        record.charges += (_in_step(site, name_a),)
        record.least_free = tuple(both.least_free)
        record.samples = alone.samples + other.samples + both.samples
        record.over_budget = alone.over_budget + other.over_budget + both.over_budget
        for (name, server), life in zip(servers, record.lives, strict=True):
            drop_cache(server, life)
            again = recorded(server.ask([probe_prompt()], PROBE_TOKENS))
            record.probes[name] = (probes[name], again)
    return record


def judge_pair(record: PairRecord, *, exact: bool = True) -> list[tuple[str, Check]]:
    """What must hold of a pair."""
    both = "both"
    ready = [life.ready for life in record.lives]
    checks: list[tuple[str, Check]] = [
        (both, Check("ready", all(ready), f"{sum(ready)} of {len(ready)}"))
    ]
    if all(ready):
        checks += [(both, check) for check in _moves(record)]
        if any(len(charges) > 1 for charges in record.charges):
            checks += [(record.lives[0].name, check) for check in _ranks(record)]
        checks += [
            (name, tokens_equal("probe_unchanged", before, after, exact=exact))
            for name, (before, after) in record.probes.items()
        ]
    for life in record.lives:
        checks += [(life.name, _renamed(check)) for check in end_checks(life)]
    return checks


def _renamed(check: Check) -> Check:
    return check._replace(title="alive") if check.title == "server_alive_after_load" else check


def _moves(record: PairRecord) -> list[Check]:
    asked = record.requests
    filled = record.a_peak - record.a_before
    kept = record.a_after - record.a_before
    grown = record.b_peak - record.b_before
    contended = (*asked.get("both_a", ()), *asked.get("both_b", ()))
    return [
        all_answered("requests_ok", (*asked.get("a_alone", ()), *asked.get("b_alone", ()))),
        Check(
            "a_filled_memory",
            filled > record.free_before / 2,
            f"{format_size(filled)} of {format_size(record.free_before)} that were free",
        ),
        Check(
            "a_released_memory",
            kept < filled / 2,
            f"keeps {format_size(kept)} of {format_size(filled)}"
            + ("" if record.released_seconds is None else f", in {record.released_seconds:.2f} s"),
        ),
        Check(
            "b_reused_a_memory",
            grown > record.free_at_peak,
            f"{format_size(grown)}, and {format_size(record.free_at_peak)} were free at a's peak",
        ),
        all_answered("contended_requests_ok", contended),
        Check(
            "charges_within_budget",
            record.samples > 0 and record.over_budget == 0,
            f"{record.over_budget} of {record.samples} looks above what the device lends",
        ),
    ]


def _ranks(record: PairRecord) -> list[Check]:
    """Of an engine with ranks on several devices, one of which has a neighbour."""
    shared, *alone = record.least_free or (0,)
    apart = [charges for charges in record.charges if len(set(charges)) > 1]
    request = max(record.request_bytes)
    return [
        Check(
            "one_rank_starved",
            bool(alone) and shared < request <= min(alone),
            f"{format_size(shared)} were free where both are, at least "
            f"{format_size(min(alone, default=0))} elsewhere",
        ),
        Check(
            "ranks_in_step",
            bool(record.charges) and not apart,
            f"{' and '.join(map(format_size, (apart or record.charges)[-1]))} charged",
        ),
    ]
