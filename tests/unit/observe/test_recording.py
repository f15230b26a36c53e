"""A recording is a trace that viewers open, also when it was cut short, and becomes a picture."""

import io
import json

import pytest

from kvtide.errors import KvtideError, UsageError
from kvtide.observe.picture import draw
from kvtide.observe.recording import Recorder, read_recording
from kvtide.observe.tally import Cause, Kind
from kvtide.observe.watcher import Watcher
from kvtide.units import MIB
from observed_world import World


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "ledgers")
    yield made
    made.close()


@pytest.fixture
def recording(world, tmp_path):
    """Two engines, of which one ends: the file."""
    path = tmp_path / "trace.json"
    watcher = Watcher(world.directory, past=False)
    chat = world.engine("chat")
    with path.open("w") as file:
        recorder = Recorder(file)
        chat.hold(1, 1, 0)
        recorder.add(watcher.look())
        chat.hold(10, 20, 2)
        world.engine("code").hold(5, 0, 0)
        recorder.add(watcher.look())
        for kind, cause in (
            (Kind.SHRINK, Cause.MIN),
            (Kind.PREEMPT, Cause.PRIORITY),
            (Kind.SHRINK, Cause.RESERVATION),
        ):
            chat.tally.note(kind, cause, 2 * MIB, 1)
        chat.tally.note(Kind.RESUME, Cause.NEED, 0, 2_000_000)
        world.end("code")
        recorder.add(watcher.look())
        recorder.end()
    return path


def test_every_line_is_what_the_trace_format_asks_for(recording):
    events = json.loads(recording.read_text())
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(event)
        assert event["ts"] >= 0
        assert event["ph"] in "MCiX"
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] == 2000.0
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["chat on paper-host", "code on paper-host", "paper-host"]
    assert {e["pid"] for e in events} <= {0, *names}


def test_what_is_read_back_is_what_was_held(recording):
    found = read_recording(recording)
    (chat, code) = (found.memory["paper-host", name] for name in ("chat", "code"))
    assert [m.figures["used"] // MIB for m in chat] == [1, 10, 10]
    assert [m.figures["used"] // MIB for m in code] == [5, 0, 0]
    assert found.devices["paper-host"][0].figures["total"] == 256 * MIB
    kinds = [kind for _, kind, _ in found.events["paper-host", "code"]]
    assert sorted(kinds) == ["appear", "grow", "vanish"]
    # What was before the first look is left out, as it was asked for.
    grown = [text for _, kind, text in found.events["paper-host", "chat"] if kind == "grow"]
    assert grown == ["grows by 30MiB (need)"]


def test_every_event_has_its_cause_and_bytes(recording):
    events = [e for e in json.loads(recording.read_text()) if e["name"] in ("shrink", "preempt")]
    assert [(e["name"], e["args"]["cause"], e["args"]["bytes"]) for e in events] == [
        ("shrink", "min", 2 * MIB),
        ("preempt", "priority", 2 * MIB),
        ("shrink", "reservation", 2 * MIB),
    ]


def test_a_recording_that_was_cut_short_is_still_one(recording):
    text = recording.read_text()
    whole = read_recording(recording)
    recording.write_text(text[: len(text) - 40])
    cut = read_recording(recording)
    assert cut.memory.keys() == whole.memory.keys()


@pytest.mark.parametrize("text", ["", "nonsense", "[\n{}\n]", '{"traceEvents": []}', "[1]"])
def test_what_is_no_recording_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="no recording"):
        read_recording(path)


@pytest.mark.parametrize(("name", "begins"), [("m.svg", b"<?xml"), ("m.png", b"\x89PNG")])
def test_pictures_are_drawn(recording, tmp_path, name, begins):
    draw(read_recording(recording), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_page_has_the_picture_and_all_events_in_words(recording, tmp_path):
    draw(read_recording(recording), tmp_path / "m.html")
    page = (tmp_path / "m.html").read_text()
    assert "<svg" in page
    assert "chat used" in page
    assert "is gone; it held 5MiB" in page
    assert "gives back 2MiB that is another&#x27;s guaranteed minimum" in page
    assert "preempts a request to give back 2MiB to one of higher priority" in page
    assert "gives back 2MiB for one that starts" in page
    assert "http://" not in page.split("</svg>")[1]


@pytest.mark.parametrize("name", ["a.html", "a.svg"])
def test_a_picture_that_cannot_be_written_says_so(recording, tmp_path, name):
    with pytest.raises(KvtideError, match=rf"{name} cannot be written: No such file"):
        draw(read_recording(recording), tmp_path / "nowhere" / name)


def test_other_kinds_of_pictures_are_refused(recording, tmp_path):
    with pytest.raises(UsageError, match=r"\.png"):
        draw(read_recording(recording), tmp_path / "m.gif")


def test_nothing_recorded_is_no_picture(tmp_path):
    path = tmp_path / "empty.json"
    with path.open("w") as file:
        recorder = Recorder(file)
        recorder.add(Watcher(tmp_path / "none").look())
        recorder.end()
    with pytest.raises(UsageError, match="no device"):
        draw(read_recording(path), tmp_path / "m.png")


def test_a_file_that_ends_at_once_is_empty():
    file = io.StringIO()
    Recorder(file).end()
    assert file.getvalue() == ""
