import pytest

from kvtide.errors import LedgerError, UsageError
from kvtide.ledger import Granted, Ledger, PoolFigures, Refusal
from kvtide.ledger import layout as w
from kvtide.units import MIB
from ledger_world import TOTAL, enroll, spec


class Device:
    """A device whose free memory is told by hand, and which can be acted on during a sample."""

    def __init__(self) -> None:
        self.free_bytes = TOTAL
        self.meanwhile = lambda: None
        self.samples = 0

    def __call__(self) -> int:
        self.samples += 1
        act, self.meanwhile = self.meanwhile, lambda: None
        act()
        return self.free_bytes


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.ns = 10**12
        monkeypatch.setattr("time.monotonic_ns", lambda: self.ns)

    def pass_ms(self, ms: int) -> None:
        self.ns += ms * 10**6


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    yield ledger
    ledger.close()


@pytest.fixture
def twin(tmp_path, ledger):
    twin = Ledger.open(tmp_path / "kv", spec())
    yield twin
    twin.close()


def budget(ledger):
    return ledger.snapshot().budget_bytes


def test_grants_add_up_to_the_budget_and_not_a_byte_more(ledger, twin):
    _, a = enroll(ledger, "a")
    _, b = enroll(twin, "b")
    assert a.grant(TOTAL - 5) == Granted(TOTAL - 5)
    assert b.grant(6) == Refusal("budget", 6, 5, False)
    assert b.grant(5) == Granted(5)
    a.refund(1)
    assert b.grant(1) == Granted(1)
    assert (a.charge_bytes, b.charge_bytes) == (TOTAL - 6, 6)
    assert ledger.snapshot().free_bytes == 0


def test_a_limit_is_over_all_pools_of_an_instance(ledger):
    instance, a = enroll(ledger, "a", limit_bytes=10)
    b = ledger.enroll(
        instance, pool_name="kv", rank=1, blocks_total=1, block_bytes=1, sampler=lambda: TOTAL
    )
    _, other = enroll(ledger, "b")
    assert a.grant(6) == Granted(6)
    assert b.grant(5) == Refusal("limit", 5, 4, False)
    assert b.grant(4) == Granted(4)
    assert other.grant(100) == Granted(100)


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1, 1 << 63, 10**30])
def test_sizes_beyond_a_word_are_refused_as_any_other(ledger, size):
    _, account = enroll(ledger, "a")
    assert account.grant(size) == Refusal("budget", size, TOTAL, False)
    with pytest.raises(LedgerError, match="more than the charge"):
        account.refund(size)
    with pytest.raises(ValueError, match="cannot"):
        account.grant(-size)
    with pytest.raises(ValueError, match="cannot"):
        account.refund(-size)
    assert account.charge_bytes == 0


@pytest.mark.parametrize(
    ("rank", "blocks", "block"), [(-1, 1, 1), (0, -1, 1), (0, 1, 0), (0, 1 << 40, 1 << 40)]
)
def test_a_pool_of_impossible_sizes_is_refused(ledger, rank, blocks, block):
    instance = ledger.register("a", explicit=True)
    with pytest.raises(UsageError):
        ledger.enroll(
            instance,
            pool_name="kv",
            rank=rank,
            blocks_total=blocks,
            block_bytes=block,
            sampler=lambda: 0,
        )


def test_a_scheduler_s_account_charges_but_measures_nothing(ledger, twin):
    _, held = enroll(ledger, "a")
    attached = twin.account(held.key)
    assert attached.grant(10) == Granted(10)
    attached.refund(4)
    assert held.charge_bytes == 6
    for own in (lambda: attached.created(1), lambda: attached.released(1), attached.sample):
        with pytest.raises(LedgerError, match="another process"):
            own()
    attached.close()
    assert held.live


def test_a_budget_is_what_is_held_and_free_less_the_margin(tmp_path, device):
    ledger = Ledger.open(tmp_path / "kv", spec(margin_bytes=16 * MIB))
    device.free_bytes = 100 * MIB
    _, account = enroll(ledger, "a", device)
    assert budget(ledger) == 84 * MIB
    account.grant(30 * MIB)
    account.created(30 * MIB)
    device.free_bytes = 60 * MIB
    assert account.sample()
    assert budget(ledger) == 74 * MIB
    account.released(10 * MIB)
    device.free_bytes = 0
    assert account.sample()
    assert budget(ledger) == 4 * MIB
    assert account.grant(1) == Refusal("budget", 1, 0, False)
    device.free_bytes = 10 * TOTAL
    account.sample()
    assert budget(ledger) == TOTAL - 16 * MIB
    ledger.close()


def test_a_cap_bounds_the_budget(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec(budget_cap_bytes=8 * MIB))
    enroll(ledger, "a")
    assert budget(ledger) == 8 * MIB
    ledger.close()


def test_what_is_created_or_released_during_a_sample_never_counts_twice(ledger, device):
    _, account = enroll(ledger, "a", device)
    account.grant(50 * MIB)
    account.created(20 * MIB)
    device.free_bytes = TOTAL - 20 * MIB - 40 * MIB  # 40 MiB are foreign
    device.meanwhile = lambda: account.created(30 * MIB)
    account.sample()
    assert budget(ledger) == TOTAL - 40 * MIB
    device.free_bytes = TOTAL - 40 * MIB - 50 * MIB
    device.meanwhile = lambda: account.released(10 * MIB)
    account.sample()
    assert budget(ledger) == TOTAL - 40 * MIB - 10 * MIB


def test_an_older_sample_never_overwrites_a_newer_one(ledger, twin, device):
    newer = Device()
    _, a = enroll(ledger, "a", device)
    _, b = enroll(twin, "b", newer)
    newer.free_bytes, device.free_bytes = 90 * MIB, 200 * MIB
    device.meanwhile = b.sample
    assert a.sample()
    assert budget(ledger) == 90 * MIB


def test_a_stopped_sampler_stops_nobody(ledger, twin, device):
    _, a = enroll(ledger, "a", device)
    _, b = enroll(twin, "b", device)

    def while_it_is_stopped():
        assert b.grant(10 * MIB) == Granted(10 * MIB)
        device.free_bytes = 100 * MIB
        assert b.sample()
        assert budget(ledger) == 100 * MIB

    device.meanwhile = while_it_is_stopped
    a.sample()
    assert budget(ledger) == 100 * MIB


def test_a_sample_during_which_a_pool_ended_is_taken_again(ledger, twin, device):
    _, a = enroll(ledger, "a", device)
    _, b = enroll(twin, "b", device)
    b.grant(60 * MIB)
    b.created(60 * MIB)
    device.free_bytes = TOTAL - 100 * MIB  # with 40 MiB foreign
    a.sample()
    assert budget(ledger) == TOTAL - 40 * MIB

    def ends():
        b.close()
        device.free_bytes = TOTAL - 40 * MIB  # its memory is free now, and was counted as held

    device.meanwhile, before = ends, device.samples
    assert a.sample()
    assert device.samples == before + 2
    assert budget(ledger) == TOTAL - 40 * MIB


def test_a_sample_during_which_a_holder_dies_is_taken_again(ledger, twin, device):
    _, a = enroll(ledger, "a", device)
    _, b = enroll(twin, "b", device)
    b.grant(60 * MIB)
    b.created(60 * MIB)

    def dies():
        twin.close()
        device.free_bytes = TOTAL - 40 * MIB

    device.free_bytes, device.meanwhile = TOTAL - 100 * MIB, dies
    assert a.sample()
    assert budget(ledger) == TOTAL - 40 * MIB
    assert ledger.snapshot().charged_bytes == 0


def test_pools_that_keep_ending_make_a_sample_fail(ledger, twin, device):
    _, a = enroll(ledger, "a", device)
    before = ledger.snapshot().sampled_ns

    def comes_and_goes():
        enroll(twin, "b")[1].close()
        device.meanwhile = comes_and_goes

    device.meanwhile = comes_and_goes
    assert not a.sample()
    assert ledger.snapshot().sampled_ns != 0
    assert ledger.snapshot().sampled_ns >= before


def test_a_refusal_says_when_a_new_sample_might_help(ledger, twin, clock):
    _, account = enroll(ledger, "a")
    too_much = TOTAL + 1
    assert not account.grant(too_much).sample_is_stale
    clock.pass_ms(1000)
    assert not account.grant(too_much).sample_is_stale
    clock.pass_ms(1)
    assert account.grant(too_much).sample_is_stale
    account.sample()
    assert not account.grant(too_much).sample_is_stale
    enroll(twin, "b")
    twin.close()
    ledger.end_dead()
    clock.pass_ms(20)
    assert not account.grant(too_much).sample_is_stale
    clock.pass_ms(1)
    assert account.grant(too_much).sample_is_stale
    clock.pass_ms(1990)
    account.sample()
    clock.pass_ms(21)
    assert not account.grant(too_much).sample_is_stale


def test_a_sample_from_before_a_reboot_is_stale(ledger, clock):
    _, account = enroll(ledger, "a")
    clock.ns = 10**9
    assert account.grant(TOTAL + 1).sample_is_stale


def test_a_refusal_by_the_limit_asks_for_no_sample(ledger, clock):
    _, account = enroll(ledger, "a", limit_bytes=1)
    clock.pass_ms(5000)
    assert account.grant(2) == Refusal("limit", 2, 1, False)


def test_refunds_that_find_the_ledger_busy_are_kept_and_made_at_the_next_change(ledger, twin):
    _, a = enroll(ledger, "a")
    _, b = enroll(ledger, "b")
    a.grant(100)
    b.grant(100)
    assert twin.file.begin()
    a.refund(30)
    a.refund(40)
    b.refund(1)
    assert (a.owed_bytes, a.charge_bytes) == (70, 100)
    assert a.grant(1).reason == "busy"
    twin.file.end()
    assert a.grant(0) == Granted(0)
    assert (a.owed_bytes, a.charge_bytes, b.charge_bytes) == (0, 30, 99)


def test_kept_refunds_are_made_by_looking_for_the_dead_as_well(ledger, twin):
    _, a = enroll(ledger, "a")
    a.grant(100)
    twin.file.begin()
    a.refund(100)
    twin.file.end()
    ledger.retire_dead()
    assert a.charge_bytes == 0


def test_a_retired_record_refuses_and_forgives(ledger, twin):
    _, held = enroll(ledger, "a")
    attached = twin.account(held.key)
    attached.grant(10)
    held.close()
    assert attached.grant(1) == Refusal("retired", 1, 0, False)
    attached.refund(10)
    attached.publish(PoolFigures(1, 1, 1, 1, 1))
    assert attached.charge_bytes == 0
    assert not attached.live
    with pytest.raises(LedgerError):
        twin.account(held.key)


def test_a_closed_account_cannot_touch_the_record_that_follows(ledger):
    instance, first = enroll(ledger, "a")
    first.close()
    _, second = enroll(ledger, "b")
    assert first.key.split(":")[0] == second.key.split(":")[0]
    with pytest.raises(LedgerError):
        first.created(1)
    first.publish(PoolFigures(9, 9, 9, 9, 9))
    first.refund(0)
    first.close()
    assert second.live
    assert ledger.snapshot().instances[-1].pools[0].figures == PoolFigures(0, 0, 0, 0, 0)
    assert instance.live


def test_closing_with_a_charge_takes_the_budget_along(ledger, twin, device):
    _, a = enroll(ledger, "a", device)
    b = enroll(twin, "b", device)[1]
    a.grant(100 * MIB)
    a.created(100 * MIB)
    a.close()
    assert budget(ledger) == TOTAL - 100 * MIB
    assert b.grant(TOTAL - 100 * MIB + 1).reason == "budget"


def test_what_was_released_before_the_end_stays_in_the_budget_and_who_waits_is_woken(
    ledger, twin, device
):
    _, a = enroll(ledger, "a", device)
    waiter, b = enroll(twin, "b", device)
    a.grant(100 * MIB)
    a.created(100 * MIB)
    a.released(90 * MIB)
    a.grant(20 * MIB)  # and nothing created of it
    waker = waiter.waker()
    waiter.wish(TOTAL)
    a.close()
    assert budget(ledger) == TOTAL - 10 * MIB
    assert waker.wait(0), "there is room, and who waits for it sleeps on"
    assert isinstance(b.grant(TOTAL - 10 * MIB), Granted)
    waker.close()


def test_figures_are_published_whole(ledger):
    _, account = enroll(ledger, "a")
    figures = PoolFigures(1, 2, 3, 4, 5, 6, 7)
    account.publish(figures)
    assert ledger.snapshot().instances[0].pools[0].figures == figures
    words = ledger.file.words
    assert words[w.pool_at(0) + w.P_FIGURES_SEQUENCE] % 2 == 0
    words[w.pool_at(0) + w.P_FIGURES_SEQUENCE] += 1  # stopped half way, by death
    assert ledger.snapshot().instances[0].pools[0].figures == figures
    account.publish(figures)
    assert words[w.pool_at(0) + w.P_FIGURES_SEQUENCE] % 2 == 0


def test_the_tables_fill_to_the_last_record_and_then_refuse(ledger):
    instances = [ledger.register(f"i{n}", explicit=True) for n in range(w.MAX_INSTANCES)]
    with pytest.raises(LedgerError, match="64 instances"):
        ledger.register("x", explicit=True)
    accounts = []
    for n in range(w.MAX_POOLS):
        accounts.append(
            ledger.enroll(
                instances[n % 64],
                pool_name="p",
                rank=n,
                blocks_total=1,
                block_bytes=1,
                sampler=lambda: TOTAL,
            )
        )
    with pytest.raises(LedgerError, match="256 pools"):
        enroll_more(ledger, instances[0])
    for account in accounts:
        assert account.grant(MIB) == Granted(MIB)
    assert accounts[0].grant(1).available_bytes == 0
    accounts[100].created(MIB)
    accounts[100].close()
    assert ledger.snapshot().charged_bytes == 255 * MIB
    assert budget(ledger) == 255 * MIB
    assert enroll_more(ledger, instances[0]).grant(MIB) == Granted(MIB)  # it has sampled
    assert budget(ledger) == TOTAL


def enroll_more(ledger, instance):
    return ledger.enroll(
        instance, pool_name="p", rank=0, blocks_total=1, block_bytes=1, sampler=lambda: TOTAL
    )
