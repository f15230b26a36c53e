"""Frames of `kvtide top` as text, and what keys make of them."""

from pathlib import Path

import pytest

from kvtide.observe.snapshot import DeviceStatus, InstanceStatus, Status
from kvtide.observe.watcher import Event, Sample
from kvtide.top.frame import frame
from kvtide.top.run import keys_in
from kvtide.top.state import Action, Chosen, press, settled
from kvtide.units import GIB, MIB

SNAPSHOTS = Path(__file__).parent / "frames"


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def instance(name, key, used, cached, idle, *, state="running", limit=None, **more):
    mib = {"used_bytes": used, "cached_bytes": cached, "idle_bytes": idle}
    return InstanceStatus(
        name=name,
        state=state,
        charged_bytes=(used + cached + idle) * MIB,
        mapped_bytes=(used + cached + idle) * MIB,
        limit_bytes=limit,
        limit_revision=4,
        pools=(),
        key=key,
        **{k: v * MIB for k, v in mib.items()},
        **more,
    )


def device(*instances, uuid="host", total=256 * MIB, **more):
    charged = sum(i.charged_bytes for i in instances)
    backend = "cuda" if uuid.startswith("GPU") else "host"
    lendable = sum(i.cached_bytes + i.idle_bytes for i in instances)
    return DeviceStatus(
        *(uuid, backend, total, 0, total, charged, total - charged, instances),
        lendable_bytes=lendable,
        **more,
    )


EVENTS = tuple(
    Event(1000.0 + n, "host", name, "grow", "need", 0, 0, text)
    for n, (name, text) in enumerate(
        [
            ("chat", "grows by 64MiB (need)"),
            ("code", "waits for 12MiB that others hold"),
            ("chat", "gives back 64MiB that others wish for"),
            ("code", "goes on after waiting 0.041 s"),
            ("code", "grows by 12MiB (need)"),
        ]
    )
)
TWO = Sample(
    1004.0,
    Status(
        (
            device(
                instance("chat", "0:1", 40, 60, 4),
                instance("code", "1:1", 80, 0, 0, state="waiting", limit=96 * MIB,
                         waiting_bytes=12 * MIB, min_bytes=32 * MIB, backed_min_bytes=32 * MIB),
                name="host memory", outside_bytes=16 * MIB,
            ),
        )
    ),
    EVENTS,
    (),
    (),
)  # fmt: skip
GPU = Sample(
    1004.0,
    Status(
        (
            device(
                *(
                    instance(
                        f"vllm-a-model-with-a-long-name-{n}",
                        f"{n}:1",
                        600 * n,
                        2000,
                        64,
                        non_kv_bytes=n % 2 * GIB,
                        loading_bytes=n % 3 // 2 * GIB,
                    )
                    for n in range(12)
                ),
                uuid="GPU-1",
                total=80 * GIB,
                name="NVIDIA H200",
                outside_bytes=9 * GIB,
            ),
            device(instance("other", "0:3", 1, 0, 0), uuid="GPU-2", total=80 * GIB),
        )
    ),
    (),
    (),
    ("the ledger host stayed locked; process 4711 held it last (is it stopped?)",),
)
NOBODY = Sample(1004.0, Status(()), (), (), ())
FRAMES = {
    "two-80x24": (TWO, Chosen(("host", "1:1")), 80, 24),
    "two-by-name-120x30": (TWO, Chosen(("host", "0:1"), sort=3), 120, 30),
    "asking-80x24": (
        TWO,
        Chosen(("host", "0:1"), asking="limit of chat (12GiB, none)", typed="96M"),
        80,
        24,
    ),
    "said-80x24": (TWO, Chosen(("host", "0:1"), said="chat gave back 64MiB"), 80, 24),
    "many-80x24": (GPU, Chosen(("GPU-1", "3:1")), 80, 24),
    "nobody-80x24": (NOBODY, Chosen(), 80, 24),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_as_they_were(name, request):
    sample, chosen, width, height = FRAMES[name]
    text = frame(sample, sample.events, chosen, width, height).plain
    path = SNAPSHOTS / f"{name}.txt"
    if not path.exists():  # delete it to have it made anew, and look at it
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()
    lines = text.split("\n")
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_any_window_is_filled_and_never_exceeded(width, height):
    for sample in (TWO, GPU, NOBODY):
        lines = frame(sample, sample.events, Chosen(), width, height).plain.split("\n")
        assert len(lines) == height
        assert all(len(line) <= width for line in lines)


def pressed(keys, chosen=None, sample=TWO):
    chosen = settled(chosen or Chosen(), sample.status)
    actions = []
    for key in keys:
        chosen, action = press(chosen, key, sample.status)
        if action is not None:
            actions.append(action)
    return chosen, actions


def test_the_first_row_is_chosen_and_arrows_move_it():
    assert pressed([])[0].key == ("host", "0:1")
    assert pressed(["down"])[0].key == ("host", "1:1")
    assert pressed(["down", "down", "up"])[0].key == ("host", "0:1")
    chosen, _ = pressed(["s"])  # by what is in use, the other one is above
    assert pressed(["up"], chosen)[0].key == ("host", "1:1")


def test_a_limit_is_asked_for_and_set_against_what_was_seen():
    chosen, actions = pressed(["down", "l", *"9X", "backspace", *"6MiB", "enter"])
    assert actions == [Action("limit", "host", "code", "96MiB", 4)]
    assert chosen.asking is None


@pytest.mark.parametrize(
    ("key", "term"), [("l", "limit"), ("m", "min"), ("p", "priority"), ("h", "headroom")]
)
def test_every_term_has_a_key(key, term):
    chosen, actions = pressed([key])
    assert (actions, chosen.asking.split()[:3]) == ([], [term, "of", "chat"])
    assert pressed([*"7", "enter"], chosen)[1] == [Action(term, "host", "chat", "7", 4)]


@pytest.mark.parametrize("keys", [["l", "escape"], ["l", *"9q", "escape"], ["l", "enter"]])
def test_an_answer_may_be_left(keys):
    chosen, actions = pressed(keys)
    assert (actions, chosen.asking) == ([], None)


def test_an_instance_that_ends_while_its_limit_is_asked_for_ends_the_question():
    chosen, _ = pressed(["down", "l", *"9"])
    (host,) = TWO.status.devices
    left = Status((device(host.instances[0]),))
    chosen = settled(chosen, left)
    assert (chosen.asking, chosen.key) == (None, ("host", "0:1"))


def test_trim_and_quit():
    assert pressed(["t"])[1] == [Action("trim", "host", "chat")]
    assert pressed(["q"])[1] == [Action("quit")]
    assert pressed(["t", "l", "up"], sample=NOBODY)[1] == []


def test_keys_are_told_apart():
    assert list(keys_in("\x1b[A\x1b[Bq\r\x7f\x1b")) == [
        *("up", "down", "q", "enter", "backspace", "escape")
    ]
