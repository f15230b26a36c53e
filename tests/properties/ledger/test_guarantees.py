"""What the policy promises, by name, over random schedules of grants, refunds, changes, deaths."""

from hypothesis import given
from hypothesis import strategies as st

from kvtide.ledger.policy import backed_mins
from policy_world import Engine, World

TOTAL = 100
sizes = st.integers(1, 60)


@st.composite
def worlds(draw):
    """Up to five instances; mins and headroom within the budget, as the ledger has them.

    Some devices have more than a cap lends of them.
    """
    world = World(TOTAL)
    if draw(st.booleans()):
        world.cap, world.total = TOTAL, TOTAL + draw(st.integers(0, 30))
    left = TOTAL
    for slot in range(draw(st.integers(2, 5))):
        pinned = draw(st.integers(0, 4))
        low = draw(st.just(0) | st.integers(0, min(40, left)))
        left -= low
        headroom = draw(st.just(0) | st.integers(0, min(10, left)))
        left -= headroom
        limit = draw(st.none() | st.integers(max(low, pinned), TOTAL))
        engine = Engine(slot, draw(st.integers(-1, 1)), low, limit, headroom, pinned)
        world.engines.append(engine)
    return world


def act(world, draw):
    """One thing that may happen to a ledger."""
    e = draw(st.sampled_from(world.engines))
    what = draw(
        st.sampled_from(
            ["ask", "ask", "ask", "finish", "trim", "answer", "set", "reserve", "load", "die"]
        )
    )
    if what == "ask":
        world.ask(e, e.want or draw(sizes))
    elif what == "finish":
        done = min(e.running, draw(sizes))
        e.running, e.idle = e.running - done, e.idle + done
    elif what == "trim":
        e.idle -= min(e.idle, draw(sizes))
    elif what == "answer":
        world.answer()
    elif what == "set":
        e.priority = draw(st.integers(-1, 1))
        e.limit = draw(st.none() | st.integers(max(e.min, e.pinned), TOTAL))
    elif what == "reserve":
        e.loading = draw(st.integers(0, 20))
    elif what == "load":
        world.total -= e.loading
        e.loading = 0
    else:
        e.running = e.idle = e.want = e.loading = e.min = e.headroom = 0


@given(worlds(), st.data())
def test_no_schedule_exceeds_the_budget_or_takes_from_a_min_that_is_wanted(world, data):
    """The assertions are in the world's own steps."""
    for _ in range(data.draw(st.integers(1, 40))):
        act(world, data.draw)


@given(worlds(), st.data())
def test_lower_priority_keeps_no_idle_memory_that_higher_priority_waits_for(world, data):
    for _ in range(data.draw(st.integers(1, 30))):
        act(world, data.draw)
    world.settle()
    for waiter in world.engines:
        room = world.budget - world.headroom - world.charged
        before = sum(
            can_have(w) for w in world.engines if w is not waiter and comes_before(w, waiter)
        )
        if not waiter.want or room - before >= can_have(waiter):
            continue
        for holder in world.engines:
            if holder.priority < waiter.priority and not holder.want:
                assert holder.idle == 0


def can_have(waiter):
    """Of what it waits for; below its own limit nobody makes room for the rest."""
    allowed = TOTAL if waiter.limit is None else max(0, waiter.limit - waiter.charged)
    return min(waiter.want, allowed)


def comes_before(a, b):
    within = a.charged < a.min
    return within or (-a.priority, a.since, a.slot) < (-b.priority, b.since, b.slot)


@given(worlds(), st.data())
def test_a_min_comes_back_from_neighbours_who_only_run(world, data):
    for _ in range(data.draw(st.integers(1, 30))):
        act(world, data.draw)
    for e in world.engines:
        e.loading = 0
    lucky = data.draw(st.sampled_from(world.engines))
    promised = sum(e.min for e in world.engines) + world.headroom
    pinned = sum(max(e.pinned - e.min, 0) for e in world.engines)
    lacks = lucky.min - lucky.charged
    if promised + pinned > world.budget or lacks <= 0:
        return
    assert lucky.limit is None or lucky.limit >= lucky.min
    lucky.want = 0
    # Others that wait are within their mins too, or come after it.
    for _ in range(20 * len(world.engines)):
        if world.ask(lucky, lacks):
            return
        world.answer()
        for e in world.engines:
            if e is not lucky and e.want and e.charged < e.min:
                world.ask(e, min(e.want, e.min - e.charged))
    raise AssertionError(f"{lucky} does not get its min back in {world}")


@given(worlds(), st.data())
def test_no_waiter_starves_while_others_come_and_go(world, data):
    """The others ask again whenever they can; what they run ends after a while."""
    for e in world.engines:
        e.priority = e.headroom = e.min = 0
        e.limit = None
    for _ in range(data.draw(st.integers(1, 20))):
        act(world, data.draw)
    for e in world.engines:
        e.priority = e.loading = 0
        e.limit = None
    world.total = TOTAL
    waiter = data.draw(st.sampled_from(world.engines))
    waiter.want = 0
    pinned = sum(e.pinned for e in world.engines)
    # An engine that runs while it waits ends its own requests, or preempts them, too.
    waiter.idle, waiter.running = waiter.idle + waiter.running, 0
    size = data.draw(st.integers(1, TOTAL - pinned))
    greedy = [(e, data.draw(sizes)) for e in world.engines if e is not waiter]
    for turn in range(400):
        if world.ask(waiter, size):
            return
        for e, appetite in greedy:
            if turn % 3 == e.slot % 3:
                e.running, e.idle = 0, e.running + e.idle
            world.answer()
            world.ask(e, e.want or appetite)
    raise AssertionError(f"{waiter} starves in {world}")


@given(worlds(), st.data())
def test_what_is_granted_is_not_asked_back_while_nobody_waits(world, data):
    """Or an engine would get and give the same memory at every step."""
    for _ in range(data.draw(st.integers(1, 30))):
        act(world, data.draw)
    for e in world.engines:
        e.want = e.loading = 0
    world.settle()
    e = data.draw(st.sampled_from(world.engines))
    if world.ask(e, data.draw(sizes)):
        e.running, e.idle = 0, e.running + e.idle
        assert world.demanded().get(e.slot) is None


@given(worlds(), st.data())
def test_who_does_not_answer_is_passed_over_and_the_others_give(world, data):
    for _ in range(data.draw(st.integers(1, 30))):
        act(world, data.draw)
    silent = data.draw(st.sampled_from(world.engines))
    silent.silent = True
    world.settle()
    kept = silent.idle
    for waiter in world.engines:
        if (
            waiter.want
            and waiter is not silent
            and all(not o.want or o is waiter for o in world.engines)
        ):
            room = world.budget - world.headroom - world.charged
            allowed = TOTAL if waiter.limit is None else waiter.limit - waiter.charged
            idle = sum(e.idle for e in world.engines if e is not silent and e is not waiter)
            assert idle == 0 or room >= min(waiter.want, allowed)
    assert silent.idle == kept


@given(worlds(), st.integers(0, TOTAL))
def test_mins_are_backed_by_priority_and_never_beyond_the_budget(world, budget):
    mins = [(e.slot, e.priority, e.min) for e in world.engines]
    backed = backed_mins(mins, budget_bytes=budget)
    assert sum(backed.values()) == min(budget, sum(e.min for e in world.engines))
    for a in world.engines:
        for b in world.engines:
            if a.priority > b.priority and backed[b.slot]:
                assert backed[a.slot] == a.min
