"""One line an event that matters, in words or as JSON; nothing for the rest."""

import json
import logging

import pytest

from kvtide.observe import logs
from kvtide.observe.tally import Cause, Kind
from kvtide.units import MIB


@pytest.fixture
def set_up():
    yield logs.set_up
    logger = logging.getLogger("kvtide")
    for handler in list(logger.handlers):
        if handler.get_name() == "kvtide":
            logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    logging.getLogger("kvtide.events").setLevel(logging.NOTSET)


def test_words(set_up, capsys):
    set_up("text")
    set_up("text")  # a second time adds no second line
    logs.log_event("chat", "host", Kind.SHRINK, Cause.OTHERS, 64 * MIB, 0)
    logs.log_event("chat", "host", Kind.WAIT, Cause.NEED, 2 * MIB, 0)
    logs.log_event("chat", "host", Kind.RESUME, Cause.NEED, 0, 1_500_000_000)
    logs.log_event("chat", "host", Kind.PREEMPT, Cause.PRIORITY, 4 * MIB, 2)
    logs.log_event("chat", "host", Kind.PREEMPT, Cause.MIN, 2 * MIB, 1)
    logs.log_event("chat", "host", Kind.SHRINK, Cause.RESERVATION, 8 * MIB, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("kvtide: ")[1] for line in lines] == [
        "chat on host gives back 64MiB that others wish for",
        "chat on host waits for 2MiB",
        "chat on host goes on after waiting 1.500 s",
        "chat on host preempts 2 requests to give back 4MiB to one of higher priority",
        "chat on host preempts a request to give back 2MiB that is another's guaranteed minimum",
        "chat on host gives back 8MiB for one that starts",
    ]


def test_json_is_one_object_a_line(set_up, capsys):
    set_up("json")
    logs.log_event("chat", "host", Kind.QUARANTINE, Cause.DEVICE, 2 * MIB, 0)
    logging.getLogger("kvtide.ranks.memory").warning("kvtide: %s", "something else")
    event, other = map(json.loads, capsys.readouterr().err.splitlines())
    assert event["level"] == "warning"
    assert (event["event"], event["cause"], event["bytes"]) == ("quarantine", "device", 2 * MIB)
    assert (event["instance"], event["device"]) == ("chat", "host")
    assert other["message"] == "kvtide: something else"
    assert event["time"].endswith("Z")


@pytest.mark.parametrize(
    ("form", "kind", "cause"),
    [
        ("none", Kind.WAIT, Cause.NEED),
        ("text", Kind.GROW, Cause.NEED),
        ("text", Kind.REFUSE, Cause.BUDGET),
        ("text", Kind.SHRINK, Cause.SURPLUS),
        ("text", Kind.EVICT, Cause.ALLOCATION),
    ],
)
def test_what_does_not_matter_is_no_line(set_up, capsys, form, kind, cause):
    set_up(form)
    logs.log_event("chat", "host", kind, cause, 1, 1)
    assert capsys.readouterr().err == ""
