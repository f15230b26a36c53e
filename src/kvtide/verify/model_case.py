"""One model, native and under kvtide: the same requests, the same tokens, the same cache hits."""

from __future__ import annotations

from collections.abc import Callable

from kvtide.verify.answers import all_answered, cached_equal, recorded, tokens_equal
from kvtide.verify.life import Life, drop_cache, end_checks, lived, ready_check
from kvtide.verify.servers import Server
from kvtide.verify.site import Site
from kvtide.verify.texts import document_questions, generation_prompts
from kvtide.verify.verdict import Check

__all__ = ["KVTIDE", "NATIVE", "PHASES", "judge_model", "run_life"]

# The names of the two servers.
NATIVE, KVTIDE = "native", "kvtide"

GENERATED_TOKENS = 64
ANSWER_TOKENS = 32
ROUNDS = 3
MAX_MODEL_LEN = 6144

_ONE_AT_A_TIME = ("gen_seq", *(f"apc_{n}" for n in range(ROUNDS)))
PHASES = ("gen_seq", "gen_conc", *(f"apc_{n}" for n in range(ROUNDS)), "apc_conc", "contexts")


def run_life(
    site: Site,
    server: Server,
    *,
    native: bool,
    margins: bool,
    say: Callable[[str], None],
) -> Life:
    """Have one server go through all phases; it may be starting already.

    `margins`: ask also how near each token was to being another one.
    """
    name = NATIVE if native else KVTIDE
    say(f"{name}: starting")
    with lived(site, server, name, native=native) as life:
        if not life.ready:
            return life

        def phase(title: str, prompts: list[str], tokens: int, *, at_once: bool = False) -> None:
            say(f"{name}: {title}")
            answers = server.ask(
                prompts, tokens, concurrency=None if at_once else 1, margins=margins
            )
            life.phases[title] = recorded(answers)

        phase("gen_seq", generation_prompts(), GENERATED_TOKENS)
        phase("gen_conc", generation_prompts(), GENERATED_TOKENS, at_once=True)
        drop_cache(server, life)
        questions = document_questions()
        for number in range(ROUNDS):
            phase(f"apc_{number}", questions, ANSWER_TOKENS)
        phase("apc_conc", questions, ANSWER_TOKENS, at_once=True)
        others = [document_questions(seed)[0] for seed in (3, 4)]
        phase("contexts", others, ANSWER_TOKENS)
    return life


def judge_model(native: Life, elastic: Life, *, exact: bool) -> list[tuple[str, Check]]:
    """Every check, with whom it is of: `native`, `kvtide`, or `both` where they are compared."""
    checks: list[tuple[str, Check]] = []
    for life in (native, elastic):
        known = () if life.native else native.log_errors
        checks.append((life.name, ready_check(life)))
        if life.ready:
            own = [all_answered(f"{name}_ok", life.phases.get(name, ())) for name in PHASES]
            dropped = "yes" if life.cache_dropped else "refused"
            own.append(Check("prefix_cache_reset", life.cache_dropped, dropped))
            own.append(_depends(life))
            checks += [(life.name, check) for check in own]
        checks += [(life.name, check) for check in end_checks(life, native=known)]
    if native.ready and elastic.ready:
        for name in _ONE_AT_A_TIME:
            ours, theirs = elastic.phases.get(name, ()), native.phases.get(name, ())
            checks.append(("both", tokens_equal(f"{name}_tokens_equal", theirs, ours, exact=exact)))
            if name.startswith("apc"):
                checks.append(("both", cached_equal(f"{name}_cached_tokens_equal", theirs, ours)))
    return checks


def _depends(life: Life) -> Check:
    """The same question after another document has another answer: the cache is read at all."""
    answers = [a.tokens for a in life.phases.get("contexts", ()) if a.error is None]
    held = len(answers) == 2 and answers[0] != answers[1]
    found = "another document, another answer" if held else "the same answer whatever came before"
    return Check("tokens_depend_on_cache", held, found)
