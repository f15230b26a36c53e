"""The checks check: for each, a kvtide that is broken in one way makes exactly that check fail.

Here on recorded phases; some of the same on real servers in tests/engines.
"""

import msgspec
import pytest

from kvtide.units import MIB
from kvtide.verify.answers import Answer, cached_equal, recorded, tokens_equal
from kvtide.verify.client import Completion
from kvtide.verify.life import Life, end_checks, find_errors
from kvtide.verify.limit_case import LimitRecord, judge_limit
from kvtide.verify.model_case import PHASES, judge_model
from kvtide.verify.order_case import ORDERS, OrderRecord, judge_order
from kvtide.verify.pair_case import PairRecord, judge_pair
from kvtide.verify.servers import Server

SIZES = {"gen_seq": 9, "gen_conc": 9, "contexts": 2}


def answers(count, first=0, cached=0):
    return tuple(Answer(tuple(range(first + i, first + i + 8)), None, cached) for i in range(count))


def life(name="kvtide", **changes):
    found = Life(
        name,
        name == "native",
        f"{name}.log",
        ready=True,
        phases={
            phase: answers(SIZES.get(phase, 4), cached=64 if phase.startswith("apc") else 0)
            for phase in PHASES
        },
        cache_dropped=True,
        alive=True,
        exit_status=0,
        registered=name != "native",
        blocks=100,
    )
    return msgspec.structs.replace(found, **changes)


def broken(checks):
    """(whose, which) of the checks that failed."""
    return [(of, check.title) for of, check in checks if not check.held]


def changed(phase, change):
    """A kvtide whose answers of one phase are other ones."""
    phases = dict(life().phases)
    phases[phase] = tuple(change(list(phases[phase])))
    return life(phases=phases)


def with_first(phase, answer):
    return changed(phase, lambda old: [answer, *old[1:]])


# One model -------------------------------------------------------------------------------------

FAILED = Answer((), "status 500")
OTHER = Answer((7, 7, 7, 7, 7, 7, 7, 7), None, 64)
MODEL_FAULTS = {
    "server_ready": None,  # below: a server that does not start has nothing else to check
    "prefix_cache_reset": life(cache_dropped=False),
    "server_alive_after_load": life(alive=False),
    "clean_exit_on_signal": life(killed=2),
    "no_error_signatures": life(log_errors=("ERROR core.py: it broke",)),
    "kvtide_active": life(registered=False),
    "no_process_left": life(left_pids=(77,)),
    # A record that stays behind: kvtide forgot to close its account.
    "ledger_empty_after_exit": life(left_records=1, left_bytes=8 * MIB),
    # Every cache is read as if it were empty: what came before changes nothing.
    "tokens_depend_on_cache": changed("contexts", lambda old: [old[0], old[0]]),
    # Extents that are not mapped, or freed too early: other tokens.
    "gen_seq_tokens_equal": with_first("gen_seq", OTHER),
    "apc_0_tokens_equal": with_first("apc_0", OTHER),
    "apc_1_tokens_equal": with_first("apc_1", OTHER),
    "apc_2_tokens_equal": with_first("apc_2", OTHER),
    # What the prefix cache holds was given away without need.
    "apc_1_cached_tokens_equal": with_first("apc_1", Answer(answers(1)[0].tokens, None, 32)),
    "gen_conc_ok": with_first("gen_conc", FAILED),
    "apc_conc_ok": with_first("apc_conc", FAILED),
}


@pytest.mark.parametrize("check", [name for name, fault in MODEL_FAULTS.items() if fault])
def test_a_broken_kvtide_fails_exactly_the_check_that_is_about_it(check):
    whose = "both" if check.endswith("_equal") else "kvtide"
    verdict = judge_model(life("native"), MODEL_FAULTS[check], exact=True)
    assert broken(verdict) == [(whose, check)]


def test_a_sound_kvtide_passes_every_check():
    verdict = judge_model(life("native"), life(), exact=True)
    assert broken(verdict) == []
    names = {check.title for _, check in verdict}
    assert names >= {
        *(f"{phase}_ok" for phase in PHASES),
        *(f"apc_{n}_cached_tokens_equal" for n in range(3)),
        "gen_seq_tokens_equal",
        "kvtide_inactive",
        *MODEL_FAULTS,
    }


def test_a_native_engine_under_kvtide_is_noticed():
    verdict = judge_model(life("native", registered=True), life(), exact=True)
    assert broken(verdict) == [("native", "kvtide_inactive")]


def test_a_server_that_does_not_start_fails_its_readiness_and_nothing_is_compared():
    dead = life(ready=False, error="the server ended with status 1\nlog", phases={}, alive=False)
    verdict = judge_model(life("native"), dead, exact=True)
    assert broken(verdict) == [("kvtide", "server_ready"), ("kvtide", "server_alive_after_load")]
    assert not any(check.title.endswith("_equal") for _, check in verdict)


def test_an_unanswered_request_of_a_compared_phase_fails_both_of_its_checks():
    verdict = judge_model(life("native"), with_first("gen_seq", FAILED), exact=True)
    assert broken(verdict) == [("kvtide", "gen_seq_ok"), ("both", "gen_seq_tokens_equal")]


def test_errors_that_native_has_too_are_not_kvtides():
    line = "(APIServer pid=12) ERROR 11-29 17:00:01 odd but harmless"
    same = line.replace("12", "3456")
    assert broken([("x", c) for c in end_checks(life(log_errors=(same,)), native=(line,))]) == []
    (only,) = broken(
        [("x", c) for c in end_checks(life(log_errors=(same, "ERROR other")), native=(line,))]
    )
    assert only == ("x", "no_error_signatures")


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("Traceback (most recent call last):", True),
        ("(EngineCore pid=3) ERROR 11-29 core.py: dead", True),
        ("Fatal: Segmentation fault", True),
        ("RuntimeError: CUDA error: an illegal memory access", True),
        ("resource_tracker: There appear to be 1 leaked shared_memory objects", False),
        ("INFO: no errors so far", False),
        ("--log-error-stack", False),
    ],
)
def test_what_counts_as_an_error_in_a_log(tmp_path, line, bad):
    log = tmp_path / "log"
    log.write_text(f"INFO one\n{line}\nINFO two\n")
    assert find_errors(log) == ([line] if bad else [])
    assert find_errors(tmp_path / "none") == []


def test_what_an_engine_says_of_its_own_end_is_no_error_once_it_ends(tmp_path):
    log = tmp_path / "log"
    handler = "ERROR 11-29 [async_llm.py:843] AsyncLLM output_handler failed."
    other = "ERROR 11-29 [core.py:12] it broke"
    log.write_text("\n".join([handler, "INFO [shutdown] API server: triggered", handler, other]))
    mark, noise = Server.end_mark, Server.end_noise
    assert find_errors(log, mark, noise) == [handler, other]
    assert find_errors(log) == [handler, handler, other]


# Tokens in lower precision ---------------------------------------------------------------------

NATIVE = Answer((5, 6, 7, 8), None, 0, ((1, 2.0), (9, 0.04), (3, 1.0), (2, 1.5)))


@pytest.mark.parametrize(
    ("tokens", "exact", "held"),
    [
        ((5, 6, 7, 8), True, True),
        ((5, 9, 1, 1), True, False),  # a near tie is no excuse in 32 bits
        ((5, 9, 1, 1), False, True),  # native's own second best, by 0.04
        ((5, 4, 7, 8), False, False),  # neither of the two
        ((5, 6, 3, 8), False, False),  # the second best, but by far
        ((5, 6, 7), False, False),
        ((5, 6, 7, 8, 9), True, False),
    ],
)
def test_only_a_near_tie_of_the_native_model_excuses_another_token(tokens, exact, held):
    check = tokens_equal("x", (NATIVE,), (Answer(tokens),), exact=exact)
    assert check.held is held


def test_nothing_to_compare_is_not_equal():
    assert not tokens_equal("x", (), (), exact=True).held
    assert not tokens_equal("x", answers(2), answers(1), exact=True).held
    assert not cached_equal("x", (), ()).held


def test_completions_are_kept_with_what_the_cache_had():
    done = Completion(0, (1, 2), None, 0.0, 1.0, 96, ((4, 0.5),))
    silent = Completion(1, (), "status 500", 0.0, 1.0)
    assert recorded([done, silent]) == (
        Answer((1, 2), None, 96, ((4, 0.5),)),
        Answer((), "status 500"),
    )


# Two engines -----------------------------------------------------------------------------------


def pair(**changes):
    record = PairRecord(
        lives=(life("a"), life("b")),
        request_bytes=(8 * MIB, 8 * MIB),
        free_before=80 * MIB,
        a_before=8 * MIB,
        a_peak=64 * MIB,
        free_at_peak=24 * MIB,
        a_after=8 * MIB,
        released_seconds=0.2,
        b_before=8 * MIB,
        b_peak=64 * MIB,
        requests={name: answers(6) for name in ("a_alone", "b_alone", "both_a", "both_b")},
        probes={"a": (answers(1), answers(1)), "b": (answers(1), answers(1))},
        samples=50,
    )
    return msgspec.structs.replace(record, **changes)


def requests(**changes):
    return {**pair().requests, **changes}


PAIR_FAULTS = {
    "requests_ok": ("both", {"requests": requests(b_alone=(FAILED,))}),
    "contended_requests_ok": ("both", {"requests": requests(both_a=(FAILED,))}),
    # It counts more than it has: nothing grows.
    "a_filled_memory": ("both", {"a_peak": 40 * MIB}),
    "a_released_memory": ("both", {"a_after": 60 * MIB, "released_seconds": None}),
    "b_reused_a_memory": ("both", {"b_peak": 30 * MIB}),
    "charges_within_budget": ("both", {"over_budget": 1}),
    "probe_unchanged": ("a", {"probes": {**pair().probes, "a": (answers(1), (OTHER,))}}),
    "alive": ("b", {"lives": (life("a"), life("b", alive=False))}),
    "clean_exit_on_signal": ("a", {"lives": (life("a", exit_status=-9), life("b"))}),
    "no_process_left": ("a", {"lives": (life("a", left_pids=(5,)), life("b"))}),
    "no_error_signatures": ("b", {"lives": (life("a"), life("b", log_errors=("ERROR x",)))}),
    "ledger_empty_after_exit": ("b", {"lives": (life("a"), life("b", left_records=1))}),
    "kvtide_active": ("b", {"lives": (life("a"), life("b", registered=False))}),
}


def test_a_sound_pair_passes():
    assert broken(judge_pair(pair())) == []
    assert {c.title for _, c in judge_pair(pair())} == {"ready", *PAIR_FAULTS}


@pytest.mark.parametrize("check", PAIR_FAULTS)
def test_a_broken_pair_fails_exactly_its_check(check):
    of, changes = PAIR_FAULTS[check]
    assert broken(judge_pair(pair(**changes))) == [(of, check)]


def test_a_pair_that_is_not_ready_is_judged_by_that_alone():
    dead = life("b", ready=False, alive=False, registered=False)
    verdict = broken(judge_pair(pair(lives=(life("a"), dead))))
    assert verdict == [("both", "ready"), ("b", "alive"), ("b", "kvtide_active")]


# A limit ---------------------------------------------------------------------------------------


def limit(**changes):
    record = LimitRecord(
        life("a"),
        idle=8 * MIB,
        filled=72 * MIB,
        limit=24 * MIB,
        in_force=24 * MIB,
        released_seconds=0.1,
        peak=24 * MIB,
        refilled=70 * MIB,
        requests=answers(104),
        refill=answers(12),
        probes=(answers(1), answers(1)),
    )
    return msgspec.structs.replace(record, **changes)


LIMIT_FAULTS = {
    "limit_set": {"in_force": None, "error": "no such instance"},
    "limit_cache_filled": {"refill": (FAILED, *answers(3))},
    "limit_released_idle": {"released_seconds": None},
    "limit_requests_ok": {"requests": (FAILED, *answers(103))},
    "limit_held_under_load": {"peak": 24 * MIB + 1},
    "limit_raised_regrows": {"refilled": 24 * MIB},
    "probe_unchanged": {"probes": (answers(1), (OTHER,))},
    "alive": {"life": life("a", alive=False)},
    "no_error_signatures": {"life": life("a", log_errors=("CRITICAL x",))},
    "clean_exit_on_signal": {"life": life("a", killed=1)},
    "no_process_left": {"life": life("a", left_pids=(1,))},
    "kvtide_active": {"life": life("a", registered=False)},
    "ledger_empty_after_exit": {"life": life("a", left_bytes=4)},
}


def test_a_sound_limit_passes():
    assert broken(judge_limit(limit())) == []
    assert {c.title for _, c in judge_limit(limit())} == {"server_ready", *LIMIT_FAULTS}


@pytest.mark.parametrize("check", LIMIT_FAULTS)
def test_a_broken_limit_fails_exactly_its_check(check):
    assert broken(judge_limit(limit(**LIMIT_FAULTS[check]))) == [("a", check)]


# Orders ----------------------------------------------------------------------------------------


def orders(**last):
    return OrderRecord({order: (life("a"), life("b", **last)) for order in ORDERS})


def test_sound_orders_pass():
    assert broken(judge_order(orders())) == []


def test_a_capacity_that_hangs_on_the_neighbour_is_noticed():
    record = orders()
    record.lives["together"] = (life("a"), life("b", blocks=99))
    assert broken(judge_order(record)) == [("both", "capacity_equal_in_any_order")]


def test_an_order_in_which_one_does_not_start_is_noticed():
    record = orders()
    record.lives["b, then a"] = (life("b"), life("a", ready=False))
    assert broken(judge_order(record)) == [("both", "ready")]
    assert broken(judge_order(OrderRecord())) == [
        ("both", "ready"),
        ("both", "capacity_equal_in_any_order"),
    ]
