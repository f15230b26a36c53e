"""Limits, mins, reservations, pressure, devices and ranks keep their promises in every order."""

from __future__ import annotations

import pytest
from protocol_explorer import explore
from sharing_model import Sharing, Terms

from ledger_invariants import InvariantViolatedError

ONE = (0,)
TWO = (0, 1)
PAIR = (Terms(ONE, 2), Terms(ONE, 2))
WORLDS = {
    "two engines that press each other": (PAIR, (2,)),
    "a limit that is set while they run": (
        (Terms(ONE, 2, limits=(None, 1)), Terms(ONE, 2)),
        (2,),
    ),
    "a min of one": ((Terms(ONE, 2, min=1), Terms(ONE, 2)), (2,)),
    "a higher priority": ((Terms(ONE, 2, priority=1), Terms(ONE, 2)), (2,)),
    "one that loads beside": ((Terms(ONE, 1, loads=True), Terms(ONE, 2)), (2,)),
    "two devices, an engine on both": ((Terms(TWO, 2), Terms((1,), 2)), (2, 2)),
    "two engines, two ranks each": ((Terms(TWO, 1), Terms(TWO, 1)), (1, 1)),
    "ranks, a min and a limit": (
        (Terms(TWO, 2, min=1), Terms(ONE, 1, limits=(None, 0))),
        (2, 1),
    ),
}


# Where there is much else to interleave, nobody dies.
LIVES_ON = (
    "a limit that is set while they run",
    "one that loads beside",
    "two devices, an engine on both",
    "ranks, a min and a limit",
)


@pytest.mark.parametrize("world", WORLDS)
def test_every_reachable_state_keeps_the_invariants(world: str) -> None:
    engines, totals = WORLDS[world]
    states = explore(Sharing(engines, totals, dies=world not in LIVES_ON))
    print(f"{world}: {states} states")
    assert states >= 500


WAKE = {"every_waiter_is_woken_or_told", "every_holder_is_called", "a_min_can_always_be_had_back"}


@pytest.mark.parametrize(
    ("world", "fault", "violated"),
    [
        (
            "a limit that is set while they run",
            "limit_checked",
            {"limit_never_exceeded_by_a_grant"},
        ),
        (
            "two engines that press each other",
            "budget_checked",
            {"charges_never_above_published_budget_by_a_grant"},
        ),
        ("two devices, an engine on both", "refunds_on_refusal", {"nothing_granted_is_forgotten"}),
        ("two engines, two ranks each", "undone_at_all_ranks", {"nothing_granted_is_forgotten"}),
        ("two engines, two ranks each", "counted_when_all_have_it", {"no_block_without_all_ranks"}),
        ("two engines that press each other", "refund_after_release", {"every_byte_has_an_owner"}),
        ("two engines that press each other", "rings_on_refund", WAKE),
        ("two engines that press each other", "rings_on_retirement", WAKE),
        ("a limit that is set while they run", "rings_on_limit", WAKE),
        ("two engines that press each other", "rings_on_wish_end", WAKE),
        ("two engines that press each other", "wish_calls_holders", WAKE),
        ("two engines that press each other", "looks_once_more", WAKE),
        ("two engines, two ranks each", "looks_by_itself", WAKE),
        ("one that loads beside", "reservation_off_budget", {"what_is_being_loaded_is_not_lent"}),
        ("a higher priority and a min", "giver_keeps_its_min", {"no_min_is_taken_from_who_runs"}),
        ("a min of one", "sets_aside", {"nobody_overtakes_a_min_that_waits"}),
        ("two engines that press each other", "lease_asked", {"live_owner_never_retired"}),
    ],
)
def test_without_one_of_its_rules_it_breaks_an_invariant(
    world: str, fault: str, violated: set[str]
) -> None:
    mins = (Terms(ONE, 2, priority=1), Terms(ONE, 2, min=1))
    engines, totals = (WORLDS | {"a higher priority and a min": (mins, (2,))})[world]
    with pytest.raises(InvariantViolatedError) as caught:
        explore(Sharing(engines, totals, dies=world not in LIVES_ON, **{fault: False}))
    print(caught.value)
    assert caught.value.name in violated
