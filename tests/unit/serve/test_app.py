"""The API: who may ask, what is refused and how, and that what is set holds in the ledger."""

import asyncio
import re

import msgspec
import pytest
from starlette.testclient import TestClient

from kvtide.errors import KvtideError
from kvtide.serve.app import make_app
from kvtide.serve.hub import Hub
from kvtide.serve.token import Token
from kvtide.units import MIB
from observed_world import World

HOST = "127.0.0.1:8470"


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "ledgers")
    yield made
    made.close()


@pytest.fixture
def token(world):
    return Token(world.directory)


@pytest.fixture
def client(world, token):
    hub = Hub(world.directory, 3600)
    with TestClient(
        make_app(world.directory, hub, token, [HOST]), base_url=f"http://{HOST}"
    ) as made:
        made.headers["authorization"] = f"Bearer {token.text}"
        made.hub = hub
        yield made


def look(client):
    client.portal.call(client.hub.look)


def test_the_snapshot_is_what_the_ledger_says(world, client):
    world.engine("chat", limit_bytes=64 * MIB).hold(10, 20, 2)
    look(client)
    (device,) = client.get("/api/v1/snapshot").json()["devices"]
    (instance,) = device["instances"]
    assert (instance["name"], instance["limit_bytes"]) == ("chat", 64 * MIB)
    assert (instance["used_bytes"], instance["cached_bytes"]) == (10 * MIB, 20 * MIB)
    assert instance["idle_bytes"] == 2 * MIB
    kinds = [event["kind"] for event in client.get("/api/v1/snapshot").json()["events"]]
    assert sorted(kinds) == ["appear", "grow"]
    assert client.get("/api/v1/history").json()[-1]["mapped_bytes"] == {"chat": 32 * MIB}


def test_terms_are_set_and_only_those_that_are_given(world, client):
    chat = world.engine("chat", limit_bytes=64 * MIB)
    answer = client.patch("/api/v1/instances/chat", json={"min": "16MiB", "priority": 3})
    assert answer.status_code == 200
    (terms,) = answer.json()
    assert (terms["min_bytes"], terms["priority"], terms["limit_bytes"]) == (16 * MIB, 3, 64 * MIB)
    answer = client.patch("/api/v1/instances/chat", json={"limit": None})
    assert answer.json()[0]["revision"] == terms["revision"] + 1
    assert chat.instance.limit_bytes is None


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("PATCH", "chat", {"limit": "64MiB", "revision": 99}, 409, "revision"),
        ("PATCH", "chat", {"limit": "lots"}, 422, "limit"),
        ("PATCH", "chat", {"limit": 5}, 422, "limit"),
        ("PATCH", "chat", {"limits": "5"}, 422, "limits"),
        ("PATCH", "chat", {"priority": 5000}, 422, "priority"),
        ("PATCH", "chat", [1], 422, "object"),
        ("PATCH", "nobody", {"limit": "64MiB"}, 404, "nobody"),
        ("PATCH", "chat", {"limit": "64MiB", "device": "other"}, 404, "other"),
        ("PATCH", "chat", {}, 422, "nothing to set"),
        ("PATCH", "chat", {"limit": "5 parsecs"}, 422, "is not a size; write for example"),
        ("PATCH", "chat", {"min": "800GiB"}, 422, "its budget is"),
        ("DELETE", "chat", None, 422, "lives"),
        ("POST", "nobody/trim", {}, 404, "nobody"),
        ("PUT", "chat", {}, 405, "Not Allowed"),
    ],
)
def test_what_cannot_be_done_says_why(world, client, method, path, body, status, said):
    chat = world.engine("chat")
    answer = client.request(method, f"/api/v1/instances/{path}", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]
    assert chat.instance.limit_bytes is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer guess"}, 401),
        ({"authorization": "Bearer é"}, 401),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": f"https://{HOST}"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example:8470"}, 421),
        ({"host": "127.0.0.1:9"}, 421),
        ({"content-type": "text/plain"}, 415),
        ({"content-length": "70000"}, 413),
    ],
)
def test_who_may_not_change_anything_changes_nothing(world, client, headers, status):
    chat = world.engine("chat")
    headers = {k: v.encode() for k, v in ({"content-type": "application/json"} | headers).items()}
    answer = client.patch("/api/v1/instances/chat", content=b'{"limit": "1MiB"}', headers=headers)
    assert answer.status_code == status
    assert chat.instance.limit_bytes is None


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"host": "evil.example"}])
def test_not_even_looking_is_for_foreign_pages(client, headers):
    assert client.get("/api/v1/snapshot", headers=headers).status_code in (403, 421)
    assert client.get("/api/v1/snapshot", headers={"authorization": ""}).status_code == 200


def test_our_own_origin_may(world, client):
    world.engine("chat")
    headers = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
    answer = client.patch("/api/v1/instances/chat", json={"limit": "9MiB"}, headers=headers)
    assert answer.status_code == 200


def test_page_and_files_load_nothing_from_elsewhere(client):
    for path in ("/", "/page.css", "/page.js", "/common.js", "/terms.js"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert not re.search(r"(src|href|url\(|import)[^\n]{0,9}https?://", answer.text)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert client.get("/grafana.json").json()["title"] == "kvtide"


def test_every_metric_of_the_dashboard_is_served(world, client):
    world.engine("chat", limit_bytes=64 * MIB).hold(10, 20, 2)
    look(client)
    served = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").text, re.M))
    served |= {name + suffix for name in served for suffix in ("_bucket", "_sum", "_count")}
    used = set(re.findall(r"kvtide_\w+", client.get("/grafana.json").text))
    assert used
    assert used <= served


def test_metrics_count_what_the_tallies_do(world, client):
    chat = world.engine("chat")
    chat.hold(10, 20, 2)
    chat.hold(10, 0, 0)
    look(client)
    text = client.get("/metrics").text
    of = 'cause="{}",device="paper-host",instance="chat"'

    def value(name, labels):
        found = {
            (m[1], frozenset(m[2].split(","))): float(m[3])
            for m in re.finditer(r"^(\w+)\{(.*)\} (\S+)$", text, re.M)
        }
        return found[name, frozenset(labels.split(","))]

    assert value("kvtide_grown_bytes_total", of.format("need")) == 32 * MIB
    assert value("kvtide_shrunk_bytes_total", of.format("others")) == 22 * MIB
    assert value("kvtide_shrinks_total", of.format("others")) == 1
    call = 'device="paper-host",instance="chat",rank="0",call="release"'
    name = "kvtide_device_call_duration_seconds"
    assert value(f"{name}_sum", call) == pytest.approx(40e-6)
    assert value(f"{name}_bucket", call + ',le="3.2e-05"') == 0
    assert value(f"{name}_bucket", call + ',le="6.4e-05"') == 1


def test_the_stream_tells_at_once_and_ends_when_it_should(world, client):
    world.engine("chat")
    with client.stream("GET", "/api/v1/events?most=1") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        (line,) = [text for text in answer.iter_lines() if text]
    assert "devices" in msgspec.json.decode(line.removeprefix("data: "))
    assert client.get("/api/v1/events?most=0").status_code == 422


def test_a_listener_that_does_not_read_holds_nobody_up(world):
    async def listen() -> int:
        hub = Hub(world.directory, 3600)
        stream = hub.stream(None)
        await anext(stream)
        for _ in range(50):
            await hub.look()
        hub.stop()
        return len([message async for message in stream])

    assert asyncio.run(listen()) <= 8


def test_the_dead_are_retired_once_seen_twice(world):
    retired = []
    world.engine("chat")
    hub = Hub(world.directory, 3600, lambda _, device: retired.append(device.device))

    async def looks() -> None:
        await hub.look()
        chat = world.engines["chat"]
        world.ledger.file.drop_lease(chat.instance._at)
        await hub.look()
        assert retired == []
        await hub.look()

    asyncio.run(looks())
    assert retired == ["paper-host"]


def test_a_token_is_made_once_for_its_owner_alone(tmp_path):
    first = Token(tmp_path / "new")
    assert first.path.stat().st_mode & 0o777 == 0o600
    assert Token(tmp_path / "new").text == first.text
    first.path.chmod(0o640)
    with pytest.raises(KvtideError, match="0640"):
        Token(tmp_path / "new")
    first.path.chmod(0o600)
    first.path.write_text("short\n")
    with pytest.raises(KvtideError, match="no token"):
        Token(tmp_path / "new")
    first.path.unlink()
    first.path.symlink_to("/etc/passwd")
    with pytest.raises(KvtideError):
        Token(tmp_path / "new")
