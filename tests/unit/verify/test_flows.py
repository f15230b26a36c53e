"""The cases' own steps, on servers and a device that only count: what is recorded of them."""

import http.client
from types import SimpleNamespace

import pytest

from kvtide.units import MIB
from kvtide.verify import life as life_module
from kvtide.verify import limit_case, pair_case
from kvtide.verify.client import Completion
from kvtide.verify.life import lived
from kvtide.verify.limit_case import judge_limit, run_limit
from kvtide.verify.model_case import PHASES, judge_model, run_life
from kvtide.verify.order_case import ORDERS, judge_order, run_order
from kvtide.verify.pair_case import judge_pair, load_for, run_pair
from kvtide.verify.servers import ServerError

REQUEST_BYTES, IDLE_BYTES, TOTAL_BYTES = 6 * MIB, 8 * MIB, 96 * MIB


class Device:
    """A device on which an engine's charge grows with its requests and goes with its cache."""

    def __init__(self, second_rank_of=None, lags_bytes=0):
        self.charges, self.limits, self.greedy = {}, {}, False
        self.lent_bytes = TOTAL_BYTES
        # An engine with another rank on a device that it has alone, where it holds less by so much.
        self.second_rank_of, self.lags_bytes = second_rank_of, lags_bytes

    def server(self, name, **changes):
        return Engine(self, name, **changes)

    def instance(self, name):
        return next(iter(self.instances(name)), None)

    def instances(self, name):
        if name not in self.charges:
            return []
        charged = self.charges[name]
        both = [charged, charged - self.lags_bytes] if name == self.second_rank_of else [charged]
        return [self.seen(name, each) for each in both]

    def seen(self, name, charged):
        cached = (charged - IDLE_BYTES) // MIB
        figures = SimpleNamespace(blocks_cached=cached)
        pool = SimpleNamespace(figures=figures, block_bytes=MIB, blocks_total=90)
        return SimpleNamespace(
            name=name, charged_bytes=charged, limit_bytes=self.limits.get(name), pools=(pool,)
        )

    def snapshots(self):
        devices = [[self.instance(name) for name in self.charges]]
        if self.second_rank_of in self.charges:
            devices.append(self.instances(self.second_rank_of)[1:])
        return [
            SimpleNamespace(
                charged_bytes=sum(i.charged_bytes for i in instances),
                spec=SimpleNamespace(ceiling_bytes=self.lent_bytes),
                free_bytes=TOTAL_BYTES - sum(i.charged_bytes for i in instances),
                instances=instances,
            )
            for instances in devices
        ]

    def charge(self, name):
        return self.charges.get(name, 0)

    def free_bytes(self):
        return TOTAL_BYTES - sum(self.charges.values())

    def set_limit(self, name, limit_bytes):
        self.limits[name] = limit_bytes
        if limit_bytes is not None and not self.greedy:
            self.charges[name] = min(self.charges[name], limit_bytes)


class Engine:
    """Answers with the last letters or ids of a prompt; caches everything."""

    end_mark, end_noise = "", ""

    def __init__(self, device, name, *, starts=True, keeps=False, dies=False):
        self.device, self.name, self.log = device, name, f"/no/such/{name}.log"
        self.starts, self.keeps, self.dies = starts, keeps, dies
        self.started, self.stopped, self.killed, self.seen = False, False, [], set()

    def start(self):
        self.started = True

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        assert self.stopped

    def wait_ready(self, seconds):
        if not self.starts:
            raise ServerError("the server ended with status 1\nits log")
        self.device.charges[self.name] = IDLE_BYTES

    def ask(self, prompts, tokens, *, concurrency=None, margins=False):
        charges = self.device.charges
        answers = []
        for index, prompt in enumerate(prompts):
            key = prompt if isinstance(prompt, str) else tuple(prompt)
            start = hash(key[:40]) % 1000
            cached = 64 if start in self.seen else 0
            self.seen.add(start)
            others = sum(size for name, size in charges.items() if name != self.name)
            room = min(TOTAL_BYTES - others, self.device.limits.get(self.name) or TOTAL_BYTES)
            charges[self.name] = min(room, charges[self.name] + REQUEST_BYTES)
            said = tuple(start + i for i in range(tokens))
            answers.append(Completion(index, said, None, 0.0, 0.1, cached, ()))
        return answers

    def drop_cache(self):
        if self.dies:
            raise http.client.HTTPException("status 404")
        self.seen.clear()
        if not self.keeps:
            self.device.charges[self.name] = IDLE_BYTES

    def healthy(self):
        return True

    def pids(self):
        return []

    def stop(self, seconds):
        self.stopped = True
        self.device.charges.pop(self.name, None)

    def exit_status(self):
        return 0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pair_case, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(pair_case, "_RELEASE_SECONDS", 0.1)
    monkeypatch.setattr(limit_case, "_ALLOWED_SECONDS", 0.1)
    monkeypatch.setattr(pair_case, "until", lambda condition, seconds: wait(condition, seconds))


def wait(condition, seconds):
    return life_module.until(condition, min(seconds, 0.1))


def broken(checks):
    return [(of, check.title) for of, check in checks if not check.held]


def silent(text):
    pass


def test_a_model_goes_through_all_phases():
    device = Device()
    told = []
    lives = [
        run_life(
            device, device.server(name), native=name == "native", margins=False, say=told.append
        )
        for name in ("native", "kvtide")
    ]
    assert tuple(lives[1].phases) == PHASES
    assert len(lives[1].phases["gen_seq"]) == 9
    assert sum(a.cached for a in lives[1].phases["apc_1"]) > 0
    # These engines know no ledger but ours: the native one is in it, which is noticed.
    assert broken(judge_model(*lives, exact=True)) == [("native", "kvtide_inactive")]
    assert told[0] == "native: starting"


def test_a_server_that_does_not_start_is_recorded_and_stopped():
    device = Device()
    server = device.server("kvtide", starts=False)
    found = run_life(device, server, native=False, margins=False, say=silent)
    assert not found.ready
    assert found.error.startswith("the server ended with status 1")
    assert server.stopped


def test_a_server_is_stopped_also_when_the_run_is_ended():
    device = Device()
    for starts in (True, False):
        server = device.server("a", starts=starts)
        if not starts:
            server.wait_ready = lambda seconds: (_ for _ in ()).throw(SystemExit(143))
        with pytest.raises(SystemExit), lived(device, server, "a", native=False):
            raise SystemExit(143)
        assert server.stopped


def test_a_refused_reset_is_recorded():
    device = Device()
    found = run_life(
        device, device.server("kvtide", dies=True), native=False, margins=False, say=silent
    )
    assert not found.cache_dropped


def pair(device=None, **changes):
    device = device or Device()
    servers = [("a", device.server("a", **changes)), ("b", device.server("b"))]
    return run_pair(device, servers, silent)


def test_a_pair_moves_memory():
    record = pair()
    assert broken(judge_pair(record)) == []
    assert record.request_bytes == (REQUEST_BYTES, REQUEST_BYTES)
    assert record.free_before == TOTAL_BYTES - 2 * IDLE_BYTES
    # 70% of the 80 MiB that were free, and of what a held with nothing in it.
    assert len(record.requests["a_alone"]) == 10
    assert record.a_peak == IDLE_BYTES + 10 * REQUEST_BYTES


def test_a_load_fills_what_its_engine_holds_already_too():
    one = 4 * MIB
    figures = SimpleNamespace(blocks_cached=4)
    pools = (SimpleNamespace(figures=figures, block_bytes=one),)
    site = SimpleNamespace(
        charge=lambda name: 16 * MIB,
        free_bytes=lambda: 64 * MIB,
        instance=lambda name: SimpleNamespace(pools=pools),
    )
    server = SimpleNamespace(ask=lambda *_, concurrency: [], drop_cache=lambda: None)
    load, found = load_for(site, server, "a", 1)
    assert found == one
    # Of the first 16 MiB nothing is seen in what is charged: more than half of the 64 must be.
    assert len(load) * one == 14 * one > 16 * MIB + 64 * MIB / 2


def test_what_is_grown_ahead_is_no_part_of_a_request():
    """On a GPU an engine grows by 32 MiB, of which four small requests hold half."""
    charges = iter([2, 34, 2, 2])
    pools = (SimpleNamespace(figures=SimpleNamespace(blocks_cached=16), block_bytes=MIB),)
    site = SimpleNamespace(
        charge=lambda name: next(charges, 2) * MIB,
        free_bytes=lambda: 1024 * MIB,
        instance=lambda name: SimpleNamespace(pools=pools),
    )
    server = SimpleNamespace(ask=lambda *_, concurrency: [], drop_cache=lambda: None)
    load, found = load_for(site, server, "a", 1)
    assert found == 4 * MIB
    assert len(load) * found > 1024 * MIB / 2


def test_charges_above_what_the_device_lends_are_noticed():
    device = Device()
    device.lent_bytes = TOTAL_BYTES - 2 * MIB
    assert broken(judge_pair(pair(device))) == [("both", "charges_within_budget")]


def test_a_starved_rank_is_one_whose_device_was_full_and_the_other_stays_in_step():
    record = pair(Device("a"))
    assert broken(judge_pair(record)) == []
    assert record.charges[0] == (record.a_peak, record.a_peak)
    # The fake neighbours take what there is, and no request waits.
    assert record.least_free[0] == 0
    assert record.least_free[1] > REQUEST_BYTES


def test_ranks_out_of_step_are_noticed():
    assert broken(judge_pair(pair(Device("a", lags_bytes=2 * MIB)))) == [("a", "ranks_in_step")]


def test_an_engine_that_keeps_what_it_cached_is_noticed():
    names = broken(judge_pair(pair(keeps=True)))
    assert ("both", "a_released_memory") in names
    assert ("both", "b_reused_a_memory") in names


def test_a_pair_that_does_not_start_records_nothing_more():
    record = pair(starts=False)
    assert broken(judge_pair(record))[0] == ("both", "ready")
    assert record.requests == {}


def test_a_limit_is_set_held_and_raised():
    device = Device()
    record = run_limit(device, "a", device.server("a"), silent)
    assert broken(judge_limit(record)) == []
    assert record.limit == 24 * MIB
    assert device.limits["a"] is None


def test_an_engine_above_its_limit_is_noticed():
    device = Device()
    device.greedy = True
    record = run_limit(device, "a", device.server("a"), silent)
    assert ("a", "limit_released_idle") in broken(judge_limit(record))


def test_all_orders_are_started():
    device = Device()
    started = []

    def make(name):
        started.append(name)
        return device.server(name)

    record = run_order(device, make, silent)
    assert tuple(record.lives) == ORDERS
    assert started == ["a", "b", "b", "a", "a", "b"]
    assert broken(judge_order(record)) == []
