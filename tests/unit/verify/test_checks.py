"""The checks check: for each, a kvtide that is broken in one way makes exactly that check fail.

Here on recorded phases; some of the same on real servers in tests/engines.
"""

import ast
import inspect

import msgspec
import pytest

from kvtide.device import open_device
from kvtide.units import MIB
from kvtide.verify import answers as answers_module
from kvtide.verify import cases, limit_case, model_case, order_case, pair_case
from kvtide.verify import life as life_module
from kvtide.verify.answers import Answer, cached_equal, recorded, tokens_equal
from kvtide.verify.cases import _device_empty
from kvtide.verify.client import Completion
from kvtide.verify.life import Life, end_checks, find_errors
from kvtide.verify.limit_case import LimitRecord, judge_limit
from kvtide.verify.model_case import PHASES, judge_model
from kvtide.verify.order_case import ORDERS, OrderRecord, judge_order
from kvtide.verify.pair_case import PairRecord, judge_pair
from kvtide.verify.servers import Server
from kvtide.verify.sglang_servers import SGLangServer
from kvtide.verify.site import Site

# What makes a check in the judges' source, its name first.
JUDGES = ("Check", "all_answered", "tokens_equal", "cached_equal")
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
# What the prefix cache holds was given away without need.
FORGOTTEN = Answer(answers(1)[0].tokens, None, 32)
# A server that does not start; nothing else is checked of it but its end.
DEAD = life(ready=False, error="the server ended with status 1\nlog", phases={}, registered=False)
# By check: a kvtide of which that one must fail.
MODEL_FAULTS = {
    "server_ready": DEAD,
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
    # Memory that a request needs never comes.
    **{f"{phase}_ok": with_first(phase, FAILED) for phase in PHASES if phase != "contexts"},
    # Extents that are not mapped, or freed too early: other tokens.
    **{
        f"{phase}_tokens_equal": with_first(phase, OTHER)
        for phase in ("gen_seq", "apc_0", "apc_1", "apc_2")
    },
    **{f"apc_{n}_cached_tokens_equal": with_first(f"apc_{n}", FORGOTTEN) for n in range(3)},
}


@pytest.mark.parametrize("check", MODEL_FAULTS)
def test_a_broken_kvtide_fails_exactly_the_check_that_is_about_it(check):
    whose = "both" if check.endswith("_equal") else "kvtide"
    verdict = judge_model(life("native"), MODEL_FAULTS[check], exact=True)
    assert broken(verdict) == [(whose, check)]


def test_answers_to_compare_contexts_with_are_needed():
    verdict = judge_model(life("native"), with_first("contexts", FAILED), exact=True)
    assert broken(verdict) == [("kvtide", "contexts_ok"), ("kvtide", "tokens_depend_on_cache")]


def test_a_sound_kvtide_passes_every_check():
    assert broken(judge_model(life("native"), life(), exact=True)) == []


def test_a_native_engine_under_kvtide_is_noticed():
    verdict = judge_model(life("native", registered=True), life(), exact=True)
    assert broken(verdict) == [("native", "kvtide_inactive")]


def test_of_a_server_that_does_not_start_nothing_is_compared():
    verdict = judge_model(life("native"), DEAD, exact=True)
    assert not any(check.title.endswith("_equal") for _, check in verdict)


def test_where_nothing_was_answered_nothing_is_equal():
    nothing = changed("apc_0", lambda old: [FAILED] * len(old))
    verdict = broken(judge_model(life("native"), nothing, exact=True))
    assert [title for _, title in verdict] == [
        "apc_0_ok",
        "apc_0_tokens_equal",
        "apc_0_cached_tokens_equal",
    ]


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
        ("nanobind: leaked 64 types!", False),
        (' - leaked type "triton._C.libtriton.ir.location"', False),
        ("ERROR: 3 blocks were leaked here", True),
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


def test_sglangs_end_by_the_signal_that_ended_its_server_is_no_error(tmp_path):
    log = tmp_path / "log"
    trace = "Traceback (most recent call last):"
    exit_hook = "Exception ignored in atexit callback"
    end = "[2026-11-30 00:31:46] INFO:     Finished server process [22790]"
    raised = ["asyncio.exceptions.CancelledError", trace, "KeyboardInterrupt"]
    log.write_text("\n".join([trace, "ValueError: no", end, trace, *raised, exit_hook]))
    mark, noise = SGLangServer.end_mark, SGLangServer.end_noise
    assert find_errors(log, mark, noise) == [trace, exit_hook]
    log.write_text("\n".join([end, trace, "RuntimeError: broken"]))
    assert find_errors(log, mark, noise) == [trace]


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
        charges=((64 * MIB, 64 * MIB), (56 * MIB, 56 * MIB)),
        least_free=(2 * MIB, 30 * MIB),
    )
    return msgspec.structs.replace(record, **changes)


def requests(**changes):
    return {**pair().requests, **changes}


PAIR_FAULTS = {
    "ready": (
        "both",
        {"lives": (life("a"), life("b", ready=False, alive=False, registered=False))},
    ),
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
    # The neighbour's memory is not counted against the rank beside it.
    "one_rank_starved": ("a", {"least_free": (24 * MIB, 30 * MIB)}),
    # One rank keeps what the others have given back.
    "ranks_in_step": ("a", {"charges": ((64 * MIB, 64 * MIB), (56 * MIB, 58 * MIB))}),
}


def test_a_sound_pair_passes():
    assert broken(judge_pair(pair())) == []
    one_rank = pair(charges=((64 * MIB,), (56 * MIB,)), least_free=(2 * MIB,))
    assert broken(judge_pair(one_rank)) == []
    names = {c.title for _, c in judge_pair(one_rank)}
    assert not names & {"one_rank_starved", "ranks_in_step"}


@pytest.mark.parametrize("check", PAIR_FAULTS)
def test_a_broken_pair_fails_exactly_its_check(check):
    of, changes = PAIR_FAULTS[check]
    assert broken(judge_pair(pair(**changes))) == [(of, check)]


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
    "server_ready": {"life": life("a", ready=False, alive=False, registered=False)},
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


@pytest.mark.parametrize("check", LIMIT_FAULTS)
def test_a_broken_limit_fails_exactly_its_check(check):
    assert broken(judge_limit(limit(**LIMIT_FAULTS[check]))) == [("a", check)]


# Orders ----------------------------------------------------------------------------------------


def orders(**last):
    """Sound ones; in the last order b is another one."""
    lives = {order: (life("a"), life("b")) for order in ORDERS}
    return OrderRecord(lives | {ORDERS[-1]: (life("a"), life("b", **last))})


B = f"b ({ORDERS[-1]})"
ORDER_FAULTS = {
    "ready": ("both", {"ready": False, "alive": False, "registered": False}),
    # A capacity that hangs on what the neighbour has.
    "capacity_equal_in_any_order": ("both", {"blocks": 99}),
    "server_alive_after_load": (B, {"alive": False}),
    "clean_exit_on_signal": (B, {"exit_status": 1}),
    "no_error_signatures": (B, {"log_errors": ("Traceback (most recent call last):",)}),
    "no_process_left": (B, {"left_pids": (4,)}),
    "kvtide_active": (B, {"registered": False}),
    "ledger_empty_after_exit": (B, {"left_records": 1}),
}


def test_sound_orders_pass():
    assert broken(judge_order(orders())) == []


@pytest.mark.parametrize("check", ORDER_FAULTS)
def test_a_broken_order_fails_exactly_its_check(check):
    of, changes = ORDER_FAULTS[check]
    assert broken(judge_order(orders(**changes))) == [(of, check)]


def test_no_orders_are_not_sound():
    assert broken(judge_order(OrderRecord())) == [
        ("both", "ready"),
        ("both", "capacity_equal_in_any_order"),
    ]


# The device ------------------------------------------------------------------------------------


def test_memory_that_a_process_keeps_is_noticed(tmp_path):
    site = Site(tmp_path / "work", tmp_path / "logs", backend="host", size_bytes=64 * MIB)
    (uuid,) = site.uuids
    device = open_device("host", host_total_bytes=64 * MIB, host_uuid=uuid)
    assert broken([_device_empty(site)]) == []
    handle = device.create(4 * MIB)
    assert broken([_device_empty(site)]) == [("device", "device_empty_at_the_end")]
    device.release(handle)
    assert broken([_device_empty(site)]) == []


# All of them -----------------------------------------------------------------------------------


def titles(checks):
    return {check.title for _, check in checks}


def test_every_check_that_there_is_has_a_fault_that_fails_it(tmp_path):
    """A new check without a test above is found here."""
    elsewhere = {"kvtide_inactive", "contexts_ok"}  # each has a test of its own above
    assert titles(judge_model(life("native"), life(), exact=True)) == {*MODEL_FAULTS, *elsewhere}
    assert titles(judge_pair(pair())) == set(PAIR_FAULTS)
    assert titles(judge_limit(limit())) == set(LIMIT_FAULTS)
    assert titles(judge_order(orders())) == set(ORDER_FAULTS)


def test_no_judge_has_a_name_that_no_sound_record_shows():
    """Every name that is written in the source is one of those."""
    known = {*MODEL_FAULTS, *PAIR_FAULTS, *LIMIT_FAULTS, *ORDER_FAULTS}
    known |= {"kvtide_inactive", "contexts_ok", "device_empty_at_the_end"}
    written = set()
    for module in (
        answers_module,
        cases,
        life_module,
        limit_case,
        model_case,
        order_case,
        pair_case,
    ):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
                first = node.args[0]
                if node.func.id in JUDGES and isinstance(first, ast.Constant):
                    written.add(first.value)
    assert {"gen_seq_ok", "alive"} <= known
    assert written
    assert written <= known
