"""Names and sizes as people and programs write them when all goes wrong."""

import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surroundings import assert_whole

from kvtide.errors import KvtideError, LedgerError, SettingsError, UsageError
from kvtide.ledger import Granted, Ledger, Refusal
from kvtide.ledger import layout as w
from kvtide.settings import Settings, check_name
from kvtide.units import format_size, parse_size
from ledger_world import TOTAL, enroll, spec

BAD_NAMES = {
    "empty": "",
    "slash": "a/b",
    "up": "../../etc/passwd",
    "newline": "a\nb",
    "nul": "a\0b",
    "escape": "\x1b[31mred",
    "space": "a b",
    "tab": "a\tb",
    "option": "--force",
    "300 bytes": "x" * 300,
    "129 bytes in another script": "名" * 43,
    "line separator": "a\u2028b",
    "delete": "a\x7fb",
}
GOOD_NAMES = [
    "a",
    "chat.dp0",
    "名前",
    "модель",
    "مدل",
    "🙂",
    "x" * 128,
    "a:b",
    "%s{0}$(x)",
    "'\"`;",
]


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "kv", spec())
    yield ledger
    ledger.close()


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_a_name_that_cannot_be_is_refused_everywhere_and_quoted(ledger, name):
    instance = ledger.register("good", explicit=True)
    for act in (
        lambda: check_name(name),
        lambda: ledger.register(name, explicit=True),
        lambda: ledger.register(name, explicit=False),
        lambda: ledger.enroll(
            instance, pool_name=name, rank=0, blocks_total=1, block_bytes=1, sampler=lambda: 0
        ),
    ):
        with pytest.raises(UsageError) as refused:
            act()
        text = str(refused.value)
        assert "\n" not in text
        assert "\x1b" not in text, "a terminal's escape sequence must not reach a terminal"
        assert len(text) < 300
    assert [i.name for i in ledger.snapshot().instances] == ["good"]
    with pytest.raises(LedgerError, match="no instance"):
        ledger.set_limit(name, 1)


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_name_of_any_script_is_kept_byte_for_byte(ledger, name):
    instance = ledger.register(name, explicit=True)
    assert instance.name == name
    (view,) = ledger.snapshot().instances
    assert view.name == name
    assert ledger.set_limit(name, 1) == 2
    assert json.loads(json.dumps(view.name)) == name
    assert sorted(p.name for p in ledger.path.parent.iterdir()) == ["host.ledger"]


def test_a_default_name_at_its_longest_still_gets_a_number_or_is_refused(ledger):
    name = "n" * 128
    assert ledger.register(name, explicit=False).name == name
    with pytest.raises(UsageError, match="longer than 128 bytes"):
        ledger.register(name, explicit=False)
    assert_whole(ledger)


SIZES = {
    "12GiB": 12 << 30,
    "12GB": 12 * 10**9,
    "12 gib": 12 << 30,
    "1.5 GiB": 3 << 29,
    "0": 0,
    "9223372036854775807": None,
    "8191PiB": None,
    "-1": None,
    "-1GiB": None,
    "+1": None,
    "1e30": None,
    "1e3": None,
    "nan": None,
    "inf": None,
    "0x10": None,
    "12G": None,
    "12 GiB GiB": None,
    "1,5GiB": None,
    "GiB": None,
    "": None,
    " ": None,
    "\uff11\uff12GiB": None,
    "9" * 400: None,
    "8388608TiB": None,
    "8388607TiB": 8388607 << 40,
}


@pytest.mark.parametrize("text", SIZES)
def test_a_size_is_read_as_it_is_written_or_refused_with_how_to_write_it(text):
    if SIZES[text] is None:
        with pytest.raises(UsageError) as refused:
            parse_size(text)
        assert "12GiB" in str(refused.value) or "2^63" in str(refused.value)
    else:
        assert parse_size(text) == SIZES[text]


def test_decimal_and_binary_units_are_never_taken_for_each_other():
    assert parse_size("12GiB") - parse_size("12GB") == 884_901_888
    assert format_size(parse_size("12GB")) == "11.18GiB"


@pytest.mark.parametrize("variable", ["LIMIT", "MIN", "HEADROOM", "MARGIN", "BUDGET"])
@pytest.mark.parametrize("text", ["-1", "1e30", "12 potatoes", "9223372036854775808"])
def test_a_bad_size_in_a_setting_stops_the_start_and_is_quoted(variable, text):
    with pytest.raises(SettingsError, match=f"KVTIDE_{variable}='{text}' is not accepted"):
        Settings.from_environ({f"KVTIDE_{variable}": text})


AT_THE_EDGE = (-1, -(1 << 63), 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30)


@pytest.mark.parametrize("size", AT_THE_EDGE)
def test_a_size_beyond_a_word_changes_nothing_wherever_it_is_given(ledger, size):
    instance, account = enroll(ledger, "a")
    account.grant(4 << 20)
    before = ledger.path.read_bytes()[w.instance_at(0) * 8 :]
    for act in (
        lambda: account.grant(size),
        lambda: account.refund(size),
        lambda: instance.wish(size),
        lambda: instance.reserve(size),
        lambda: instance.loaded(size),
        lambda: instance.measured(size, "given"),
        lambda: ledger.set_limit("a", size),
        lambda: ledger.set_terms("a", lambda t: t._replace(min_bytes=size)),
        lambda: ledger.set_terms("a", lambda t: t._replace(headroom_bytes=size)),
        lambda: ledger.set_terms("a", lambda t: t._replace(priority=abs(size) * 2000)),
        lambda: ledger.ask_to_trim("a", size),
        lambda: ledger.register("b", explicit=True, limit_bytes=size),
        lambda: ledger.register("b", explicit=True, min_bytes=size),
    ):
        try:
            answer = act()
        except (ValueError, KvtideError):
            continue
        assert isinstance(answer, Refusal)
    assert ledger.path.read_bytes()[w.instance_at(0) * 8 :] == before
    assert_whole(ledger)
    assert account.grant(TOTAL - (4 << 20)) == Granted(TOTAL - (4 << 20))


def assert_one_line(error: UsageError) -> None:
    assert "\n" not in str(error)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_size_or_a_clear_refusal(text):
    try:
        size = parse_size(text)
    except UsageError as error:
        assert_one_line(error)
        return
    assert 0 <= size < 1 << 63


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_a_name_or_a_clear_refusal(text):
    try:
        name = check_name(text)
    except UsageError as error:
        assert_one_line(error)
        return
    assert name == text
    assert not set(name) & set("/\n\0 \t\r")
    name.encode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["limit", "a\nb", "1GiB"],
        ["limit", "nobody", "-1"],
        ["limit", "nobody", "1e30"],
        ["set", "nobody", "--min", "9223372036854775808"],
        ["set", "nobody", "--priority", "1e9"],
        ["trim", "../x", "--to", "12"],
        ["evict", "x" * 300],
    ],
)
def test_a_command_answers_odd_input_in_one_line(tmp_path, arguments):
    seed = random.randrange(1 << 30)
    directory = tmp_path / f"kv-{seed}"
    Ledger.open(directory, spec()).close()
    done = subprocess.run(
        [sys.executable, "-c", "from kvtide.cli import main; main()", *arguments],
        env={**os.environ, "KVTIDE_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode in (1, 2), done
    assert "Traceback" not in done.stderr
    assert "kvtide" in done.stderr or "Usage" in done.stderr or "Error" in done.stderr
