from hypothesis import given
from hypothesis import strategies as st

from kvtide.ledger.policy import Holding, judge
from kvtide.ledger.sharing import demands

sizes = st.integers(0, 40)


def idle_of(holdings, *, budget_bytes, granularity_bytes):
    asked = demands(
        holdings, budget_bytes=budget_bytes, granularity_bytes=granularity_bytes, beyond_bytes=0
    )
    return {slot: demand.idle_bytes for slot, demand in asked.items()}


@st.composite
def ledgers(draw):
    holdings = []
    for slot in range(draw(st.integers(1, 6))):
        idle, releasing, pinned = draw(sizes), draw(sizes), draw(sizes)
        limit = draw(st.none() | st.integers(0, 150))
        wish = draw(st.just(0) | sizes)
        charged = idle + releasing + pinned
        holdings.append(Holding(slot, charged, limit, idle, releasing, wish, draw(sizes)))
    return holdings


@given(ledgers(), st.integers(-50, 400), st.sampled_from([1, 2, 8]))
def test_nobody_is_asked_for_more_than_it_holds_idle(holdings, budget, granularity):
    asked = idle_of(holdings, budget_bytes=budget, granularity_bytes=granularity)
    idle = {h.slot: h.idle_bytes for h in holdings}
    assert all(0 < bytes_ <= idle[slot] for slot, bytes_ in asked.items())


@given(ledgers(), st.integers(-50, 400))
def test_the_oldest_wish_gets_all_that_is_there_for_it(holdings, budget):
    wishes = [h for h in holdings if h.wish_bytes]
    if not wishes:
        return
    oldest = min(wishes, key=lambda h: (h.wish_since_ns, h.slot))
    need = oldest.wish_bytes
    if oldest.limit_bytes is not None:
        need = min(need, max(0, oldest.limit_bytes - oldest.charged_bytes))
    asked = idle_of(holdings, budget_bytes=budget, granularity_bytes=1)
    others = [h for h in holdings if h is not oldest]
    room = budget - sum(h.charged_bytes for h in holdings)
    comes = room + sum(asked.get(h.slot, 0) + h.releasing_bytes for h in holdings)
    all_given = all(asked.get(h.slot, 0) == h.idle_bytes for h in others)
    assert comes >= need or all_given or need == 0
    over = oldest.limit_bytes is not None and oldest.charged_bytes > oldest.limit_bytes
    assert oldest.slot not in asked or over


@given(ledgers(), st.integers(-50, 400))
def test_no_more_is_asked_than_the_wishes_and_the_limits_need(holdings, budget):
    asked = idle_of(holdings, budget_bytes=budget, granularity_bytes=1)
    lost = max(0, sum(h.charged_bytes for h in holdings) - budget)
    wishes = sum(h.wish_bytes for h in holdings)
    over = sum(
        max(0, h.charged_bytes - h.limit_bytes) for h in holdings if h.limit_bytes is not None
    )
    assert sum(asked.values()) <= (wishes + lost if wishes else 0) + over


@given(ledgers(), st.integers(0, 400))
def test_who_gives_what_was_asked_is_not_asked_again(holdings, budget):
    asked = idle_of(holdings, budget_bytes=budget, granularity_bytes=1)
    begun = [
        h._replace(
            idle_bytes=h.idle_bytes - asked.get(h.slot, 0),
            releasing_bytes=h.releasing_bytes + asked.get(h.slot, 0),
        )
        for h in holdings
    ]
    assert idle_of(begun, budget_bytes=budget, granularity_bytes=1) == {}


@given(sizes, st.integers(-20, 100), sizes, st.none() | sizes, sizes)
def test_a_grant_passes_neither_budget_nor_limit(asked, budget, charged, limit, own):
    verdict = judge(
        asked,
        budget_bytes=budget,
        charged_bytes=charged + own,
        limit_bytes=limit,
        instance_charged_bytes=own,
    )
    fits = charged + own + asked <= budget and (limit is None or own + asked <= limit)
    assert (verdict.reason is None) == fits
    assert (asked <= verdict.available_bytes) == fits or asked == 0
