"""Commands as a person runs them: one clear error each, no traceback, the right status."""

import json
import os
import subprocess
import sys

import pytest

from kvtide.cli import main
from kvtide.ledger import DeviceSpec, Ledger
from kvtide.units import MIB

SPEC = DeviceSpec("host", "host", "host memory", 256 * MIB, 0, None, 2 * MIB)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    for variable in [v for v in os.environ if v.startswith("KVTIDE")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("KVTIDE_DIR", str(tmp_path / "ledgers"))
    return tmp_path / "ledgers"


@pytest.fixture
def chat(directory):
    ledger = Ledger.open(directory, SPEC)
    instance = ledger.register("chat", explicit=True)
    yield instance
    instance.close()
    ledger.close()


@pytest.fixture
def kvtide(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


def test_version(kvtide):
    assert kvtide("--version") == (0, "kvtide 0.1.0\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("limit", "chat", "5zz"),
        ("limit", "chat"),
        ("limit", "chat", "none", "--revision", "soon"),
        ("nonsense",),
        ("run",),
        ("run", "--limit", "5zz", "--", "true"),
        ("run", "--name", "two words", "--", "true"),
        ("run", "--", "no-such-command-anywhere"),
        ("run", "--limit", "8GiB", "--budget", "4GiB", "--", "true"),
    ],
)
def test_usage_errors_end_with_2(kvtide, chat, arguments):
    status, out, err = kvtide(*arguments)
    assert (status, out) == (2, "")
    assert err
    assert "Traceback" not in err


def test_status_without_a_ledger(kvtide, directory):
    status, out, _ = kvtide("status")
    assert status == 0
    assert str(directory) in out


def test_status_shows_an_instance(kvtide, chat):
    status, out, _ = kvtide("status")
    assert status == 0
    assert "chat" in out
    assert "256MiB" in out
    status, out, _ = kvtide("status", "--json")
    (device,) = json.loads(out)["devices"]
    assert device["instances"][0]["name"] == "chat"


def test_status_cuts_no_figure_in_a_narrow_terminal(kvtide, chat, monkeypatch):
    wide = kvtide("status")[1]
    monkeypatch.setenv("COLUMNS", "40")
    assert kvtide("status")[1] == wide
    rows = [line.split() for line in wide.splitlines()]
    assert ["instance", "state", "charged", "mapped"] in [row[:4] for row in rows]
    assert "…" not in wide


def test_status_of_a_broken_ledger_is_one_error(kvtide, chat, directory):
    (directory / "other.ledger").write_bytes(b"short")
    status, out, err = kvtide("status")
    assert (status, out) == (1, "")
    assert err.startswith("kvtide: the ledger ")
    assert err.count("\n") == 1


def test_limit_is_set_lifted_and_numbered(kvtide, chat):
    first = chat.limit_revision + 1
    done = kvtide("limit", "chat", "64MiB")
    assert done[:2] == (0, f"chat on host: limit 64MiB, revision {first}\n")
    assert chat.limit_bytes == 64 * MIB
    done = kvtide("limit", "chat", "none")
    assert done[:2] == (0, f"chat on host: limit none, revision {first + 1}\n")
    assert chat.limit_bytes is None


def test_an_older_revision_never_overwrites(kvtide, chat):
    seen = chat.limit_revision
    assert kvtide("limit", "chat", "64MiB", "--revision", str(seen))[0] == 0
    status, _, err = kvtide("limit", "chat", "32MiB", "--revision", str(seen))
    assert status == 1
    assert f"revision {seen + 1}" in err
    assert chat.limit_bytes == 64 * MIB


def test_limit_of_nobody_names_who_is_there(kvtide, chat):
    status, _, err = kvtide("limit", "nobody", "1GiB")
    assert status == 1
    assert "chat" in err
    status, _, err = kvtide("limit", "chat", "1GiB", "--device", "GPU-1")
    assert status == 1
    assert "GPU-1" in err


def test_run_hands_settings_to_the_engine(directory):
    show = "import os, sys; print(sorted(k for k in os.environ if 'KVTIDE' in k), sys.argv[1:])"
    kvtide = [sys.executable, "-c", "from kvtide.cli import main; main()"]
    options = ["--name", "a", "--limit", "64MiB"]
    done = subprocess.run(
        [*kvtide, "run", *options, "--", sys.executable, "-c", show, "--limit", "theirs"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == (
        "['KVTIDE', 'KVTIDE_DIR', 'KVTIDE_LIMIT', 'KVTIDE_NAME'] ['--limit', 'theirs']"
    )


def test_doctor_ends_with_1_where_something_is_wrong(kvtide, directory, monkeypatch):
    assert kvtide("doctor")[0] == 0
    monkeypatch.setenv("KVTIDE_MARGIN", "lots")
    status, out, err = kvtide("doctor", "--json")
    assert (status, err) == (1, "")
    assert json.loads(out)["ok"] is False


def test_the_command_line_imports_neither_ledger_nor_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import kvtide.cli, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "numpy", "kvtide.ledger", "kvtide.device", "matplotlib"}


def test_a_census_of_nobody_is_one_line(kvtide, directory):
    status, out, said = kvtide("census", "nobody")
    assert (status, out) == (1, "")
    assert said == f"kvtide: no instance 'nobody' runs; there is none at all (in {directory})\n"


def test_a_census_of_an_engine_that_is_still_starting_shows_the_ledger(kvtide, chat):
    assert kvtide("census", "chat", "--json") == (0, '{\n  "name": "chat",\n  "ranks": []\n}\n', "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--engine", "abacus"), "cannot be checked"), (("--backend", "tpu"), "is not host or cuda")],
)
def test_verify_refuses_what_it_does_not_know(kvtide, arguments, says):
    status, _, said = kvtide("verify", *arguments)
    assert status == 2
    assert says in said
    assert said.count("\n") == 1
