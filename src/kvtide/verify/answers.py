"""What servers answered, as it is kept in a report, and whether two answered the same."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtide.verify.client import Completion
from kvtide.verify.verdict import Check

__all__ = ["Answer", "all_answered", "cached_equal", "recorded", "tokens_equal"]

# Of logarithms of probability: what rounding to 16 bits moves them by, several layers deep.
_NEAR_TIE = 0.1


class Answer(msgspec.Struct, frozen=True):
    """One request's outcome. `cached`: tokens of the prompt that the prefix cache had."""

    tokens: tuple[int, ...]
    error: str | None = None
    cached: int = 0
    margins: tuple[tuple[int, float], ...] = ()


def recorded(completions: Sequence[Completion]) -> tuple[Answer, ...]:
    """Answers of completions. A server that says nothing of its cache found nothing in it."""
    return tuple(Answer(c.tokens, c.error, c.cached_tokens or 0, c.margins) for c in completions)


def all_answered(name: str, answers: Sequence[Answer]) -> Check:
    """Every request was answered in full."""
    failed = [a.error for a in answers if a.error is not None]
    found = f"{len(answers) - len(failed)} of {len(answers)}"
    return Check(
        name, bool(answers) and not failed, found if not failed else f"{found}: {failed[0]}"
    )


def tokens_equal(
    name: str, native: Sequence[Answer], elastic: Sequence[Answer], *, exact: bool
) -> Check:
    """The tokens are the native engine's; if not `exact`, but for what nearly was a tie there.

    After such a token the two continue different texts, of which no more is compared. Requests that
    were not answered fail another check, and are not compared.
    """
    if len(native) != len(elastic):
        return Check(name, False, f"{len(elastic)} answers, native {len(native)}")
    equal = ties = 0
    wrong = []
    compared = _answered_by_both(native, elastic)
    for number, theirs, ours in compared:
        at = _first_difference(ours.tokens, theirs.tokens)
        if at is None:
            equal += 1
        elif not exact and _near_tie(ours, theirs, at):
            ties += 1
        else:
            wrong.append(f"request {number} differs at token {at}{_why(theirs, at)}")
    found = f"{equal} of {len(compared)} equal"
    if ties:
        found += f", {ties} differ from a near tie of the native model on"
    held = bool(compared) and not wrong
    return Check(name, held, f"{found}; {wrong[0]}" if wrong else found)


def _answered_by_both(
    native: Sequence[Answer], elastic: Sequence[Answer]
) -> list[tuple[int, Answer, Answer]]:
    pairs = enumerate(zip(native, elastic, strict=False))
    return [(n, theirs, ours) for n, (theirs, ours) in pairs if not (theirs.error or ours.error)]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _near_tie(ours: Answer, theirs: Answer, at: int) -> bool:
    if at >= len(theirs.margins) or at >= len(ours.tokens):
        return False
    second, margin = theirs.margins[at]
    return ours.tokens[at] == second and margin <= _NEAR_TIE


def _why(theirs: Answer, at: int) -> str:
    if at >= len(theirs.margins):
        return ""
    return f", where native was ahead by {theirs.margins[at][1]:.3f}"


def cached_equal(name: str, native: Sequence[Answer], elastic: Sequence[Answer]) -> Check:
    """The prefix cache had the same tokens of every prompt that both answered."""
    compared = _answered_by_both(native, elastic)
    ours, theirs = sum(o.cached for _, _, o in compared), sum(t.cached for _, t, _ in compared)
    held = bool(compared) and all(o.cached == t.cached for _, t, o in compared)
    return Check(name, held, f"{ours} tokens, native {theirs}")
