"""What must hold of a ledger, by name: for the model of the protocol and for real ledgers alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class InvariantViolatedError(AssertionError):
    """Names the invariant and what broke it."""

    def __init__(self, name: str, detail: object) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


class Held(NamedTuple):
    """A live record against the truth. `alive`: its holder still runs; `held`: really held now."""

    alive: bool
    charge: int
    held: int


class Truth(NamedTuple):
    """A ledger against the device: `free` as the driver has it, `margin` never lent."""

    budget: int
    margin: int
    free: int
    records: Sequence[Held]


def require(name: str, holds: bool, detail: object) -> None:
    if not holds:
        raise InvariantViolatedError(name, detail)


def charges_never_above_published_budget_by_a_grant(budget: int, charged_after: int) -> None:
    require(
        "charges_never_above_published_budget_by_a_grant",
        charged_after <= max(0, budget),
        f"{charged_after} charged, {budget} published",
    )


def no_credit_before_release(truth: Truth) -> None:
    """What is promised, to those who were granted and to the next who asks, is free already.

    Holds at every moment without foreign memory. The dead will never use what they were granted.
    """
    charged = sum(record.charge for record in truth.records)
    granted = sum(record.charge - record.held for record in truth.records if record.alive)
    room = max(0, truth.budget - charged)
    require(
        "no_credit_before_release",
        room + granted <= max(0, truth.free - truth.margin),
        f"room {room} and {granted} granted and not held, of {truth.free} free: {truth}",
    )


def every_byte_has_an_owner(truth: Truth) -> None:
    """What a living holder has is charged to its record.

    What the dead had is for the record to explain until it is retired, and no credit from then on.
    """
    for record in truth.records:
        owned = record.held <= record.charge or not record.alive
        require("every_byte_has_an_owner", owned and min(record) >= 0, truth)


def live_owner_never_retired(alive: bool) -> None:
    require("live_owner_never_retired", not alive, "a record ended while its holder runs")


def older_sample_never_overwrites_newer(stored_from: int, storing: int) -> None:
    require(
        "older_sample_never_overwrites_newer",
        storing > stored_from,
        f"the budget of ticket {stored_from} overwritten by that of {storing}",
    )


def budget_never_above_what_was_there(budget: int, there: int, charges_of_dying: int) -> None:
    """`there`: free and held by records when the sample was taken, less the margin.

    What one dying held may be counted twice while its lease has not dropped; its charge covers
    that, and falls together with the budget.
    """
    require(
        "budget_never_above_what_was_there",
        budget - charges_of_dying <= max(0, there),
        f"{budget} published, {there} was there, {charges_of_dying} charged to the dying",
    )
