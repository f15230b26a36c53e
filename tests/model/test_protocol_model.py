"""The protocol keeps its promises in every interleaving; each rule that it has is needed."""

from __future__ import annotations

import pytest
from protocol_explorer import explore
from protocol_model import Protocol

from ledger_invariants import InvariantViolatedError


@pytest.mark.parametrize(
    ("protocol", "at_least"),
    [
        pytest.param(Protocol(slots=2, total=1), 10_000, id="two, joining again and again"),
        pytest.param(Protocol(slots=2, total=2, joins_again=False), 30_000, id="two, two units"),
        pytest.param(Protocol(slots=2, total=2, margin=1), 10_000, id="two, with a margin"),
        pytest.param(Protocol(slots=2, total=1, foreign=1), 10_000, id="two and foreign memory"),
        pytest.param(Protocol(slots=3, total=1, joins_again=False, samplers=1), 10_000, id="three"),
    ],
)
def test_every_reachable_state_keeps_the_invariants(protocol: Protocol, at_least: int) -> None:
    assert explore(protocol) >= at_least


@pytest.mark.parametrize(
    ("fault", "violated"),
    [
        ({"refund_before_release": True}, {"no_credit_before_release", "every_byte_has_an_owner"}),
        ({"charged_before_create": False}, {"every_byte_has_an_owner"}),
        ({"created_read_before": False}, {"budget_never_above_what_was_there"}),
        ({"released_read_after": False}, {"budget_never_above_what_was_there"}),
        ({"released_counted_before": False}, {"budget_never_above_what_was_there"}),
        ({"discard_on_removal": False, "foreign": 1}, {"budget_never_above_what_was_there"}),
        ({"sample_asks_leases": False, "foreign": 1}, {"budget_never_above_what_was_there"}),
        ({"tickets_checked": False}, {"older_sample_never_overwrites_newer"}),
        ({"ticket_before_budget": False}, {"older_sample_never_overwrites_newer"}),
        ({"budget_falls_with_charge": False}, {"no_credit_before_release"}),
        ({"budget_before_charge": False}, {"no_credit_before_release"}),
        ({"lease_asked": False}, {"live_owner_never_retired"}),
        ({"generation_checked": False}, {"every_byte_has_an_owner"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_protocol_without_one_of_its_rules_breaks_an_invariant(
    fault: dict[str, bool], violated: set[str]
) -> None:
    with pytest.raises(InvariantViolatedError) as caught:
        explore(Protocol(slots=2, total=2, **fault))
    print(caught.value)
    assert caught.value.name in violated
