from kvtide.ledger.policy import Holding, Verdict, judge
from kvtide.ledger.sharing import demands, reasons

MIB = 1 << 20


def holding(slot, charged=0, limit=None, idle=0, releasing=0, wish=0, since=0):
    return Holding(slot, charged, limit, idle, releasing, wish, since)


def shares(*holdings, budget, granularity=1):
    """Idle bytes by slot; these holdings hold nothing that could be preempted for."""
    asked = demands(holdings, budget_bytes=budget, granularity_bytes=granularity, beyond_bytes=0)
    assert not any(demand.running_bytes for demand in asked.values())
    return {slot: demand.idle_bytes for slot, demand in asked.items()}


def test_a_grant_is_judged_by_budget_and_limit():
    def room(asked, limit):
        return judge(
            asked,
            budget_bytes=100,
            charged_bytes=80,
            limit_bytes=limit,
            instance_charged_bytes=30,
        )

    assert room(20, None) == Verdict(None, 20)
    assert room(21, None) == Verdict("budget", 20)
    assert room(20, 50) == Verdict(None, 20)
    assert room(11, 40) == Verdict("limit", 10)
    assert room(1, 10) == Verdict("limit", 0)
    assert room(0, 30) == Verdict(None, 0)


def test_nothing_is_granted_of_a_budget_below_zero():
    verdict = judge(
        1, budget_bytes=-50, charged_bytes=10, limit_bytes=None, instance_charged_bytes=0
    )
    assert verdict == Verdict("budget", 0)


def test_nobody_gives_without_a_wish():
    assert shares(holding(0, 50, idle=50), holding(1, 50, idle=50), budget=100) == {}


def test_free_room_serves_a_wish_before_anybody_gives():
    assert shares(holding(0, 50, idle=50), holding(1, wish=50), budget=100) == {}
    assert shares(holding(0, 50, idle=50), holding(1, wish=60), budget=100) == {0: 10}


def test_holders_share_in_proportion_to_what_they_hold_idle():
    assert shares(
        holding(0, 300, idle=300),
        holding(1, 100, idle=100),
        holding(2, 100),
        holding(3, wish=40),
        budget=500,
    ) == {0: 30, 1: 10}


def test_shares_are_whole_granules_but_never_above_what_is_idle():
    assert shares(
        holding(0, 10, idle=7), holding(1, 10, idle=3), holding(2, wish=5), budget=20, granularity=4
    ) == {0: 4, 1: 3}
    assert shares(
        holding(0, 10, idle=7), holding(1, 10, idle=3), holding(2, wish=99), budget=20
    ) == {0: 7, 1: 3}


def test_what_is_being_released_counts_as_given():
    both = {"budget": 200}
    assert shares(
        holding(0, 100, idle=100), holding(1, 100, idle=100), holding(2, wish=50), **both
    ) == {0: 25, 1: 25}
    begun = holding(0, 100, idle=75, releasing=25)
    assert shares(begun, holding(1, 100, idle=100), holding(2, wish=50), **both) == {1: 25}


def test_a_wish_is_served_up_to_its_own_limit_alone():
    assert shares(holding(0, 100, idle=100), holding(1, 10, limit=15, wish=50), budget=110) == {
        0: 5
    }
    assert shares(holding(0, 100, idle=100), holding(1, 10, limit=5, wish=50), budget=110) == {}


def test_an_overshoot_is_given_back_and_serves_wishes_on_the_way():
    over = holding(0, 100, limit=70, idle=50)
    assert shares(over, budget=100) == {0: 30}
    assert shares(over, holding(1, wish=20), budget=100) == {0: 30}
    assert shares(over, holding(1, wish=40), budget=100) == {0: 40}
    assert shares(holding(0, 100, limit=70, idle=10), budget=100) == {0: 10}


def test_two_who_wish_do_not_trade_their_caches_and_the_older_wish_wins():
    older = holding(0, 40, idle=40, wish=50, since=1)
    newer = holding(1, 60, idle=60, wish=10, since=2)
    assert shares(older, newer, budget=100) == {1: 50}


def test_memory_that_the_device_has_lost_is_made_good_before_a_wish_is_served():
    assert shares(holding(0, 100, idle=100), holding(1, wish=10), budget=60) == {0: 50}
    assert shares(holding(0, 100, idle=100), budget=60) == {}


def why(*holdings, budget):
    """For what each gives."""
    asked = demands(holdings, budget_bytes=budget, granularity_bytes=1, beyond_bytes=0)
    found = reasons(holdings, budget_bytes=budget, granularity_bytes=1, beyond_bytes=0)
    assert set(found) == set(asked)
    return found


def test_a_demand_says_for_what_it_is():
    giver = Holding(0, 100, idle_bytes=40)
    wishes = Holding(1, wish_bytes=30, wish_since_ns=5)
    assert why(giver, wishes, budget=100) == {0: "others"}
    assert why(giver, wishes._replace(priority=1), budget=100) == {0: "priority"}
    assert why(giver, wishes._replace(priority=-1), budget=100) == {0: "others"}
    assert why(giver, wishes._replace(min_bytes=30, priority=-1), budget=100) == {0: "min"}
    assert why(giver, Holding(1, loading_bytes=30), budget=70) == {0: "reservation"}
    assert why(giver, Holding(1, headroom_bytes=30), budget=100) == {0: "headroom"}
    assert why(giver._replace(limit_bytes=70), budget=100) == {0: "limit"}
    assert why(giver._replace(trim_to_bytes=70), budget=100) == {0: "trim"}
    assert why(giver, budget=100) == {}


def test_running_requests_are_preempted_for_a_min_or_a_priority():
    giver = Holding(0, 100)
    wishes = Holding(1, wish_bytes=30, wish_since_ns=5)
    assert why(giver, wishes, budget=100) == {}
    assert why(giver, wishes._replace(priority=1), budget=100) == {0: "priority"}
    assert why(giver, wishes._replace(min_bytes=30), budget=100) == {0: "min"}


def test_of_several_reasons_the_one_of_most_bytes_is_told():
    giver = Holding(0, 100, limit_bytes=95, idle_bytes=40)
    wishes = Holding(1, wish_bytes=30, wish_since_ns=5, min_bytes=12)
    assert why(giver, wishes, budget=100) == {0: "others"}
    assert why(giver, wishes._replace(min_bytes=28), budget=100) == {0: "min"}


def test_what_goes_already_accounts_for_what_came_first():
    giver = Holding(0, 100, limit_bytes=80, idle_bytes=20, releasing_bytes=20)
    assert why(giver, budget=100) == {}
    wishes = Holding(1, wish_bytes=25, wish_since_ns=5)
    assert why(giver, wishes, budget=100) == {0: "others"}
