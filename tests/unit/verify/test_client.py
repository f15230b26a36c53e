"""The client against a small server of our own: order, errors as values, metrics."""

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvtide.verify.client import complete, metric, post, random_prompts

METRICS = """# HELP vllm:num_preemptions_total Preemptions.
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_total{engine="1"} 4.0
vllm:num_preemptions_totally{engine="1"} 100.0
"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(200, METRICS.encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path == "/missing":
            return self._answer(404, b"no such page")
        if not asked:
            return self._answer(200, b"")
        assert asked["temperature"] == 0
        assert asked["ignore_eos"]
        assert asked["return_token_ids"]
        first = len(asked["prompt"]) if isinstance(asked["prompt"], str) else asked["prompt"][0]
        if first == 13:
            return self._answer(500, b"engine died")
        count = asked["max_tokens"] - (first == 14)
        tokens = [first + i for i in range(count)]
        choice = {"token_ids": tokens}
        if asked.get("logprobs"):
            assert asked["return_tokens_as_token_ids"]
            top = [{f"token_id:{t}": -0.25, f"token_id:{t + 1}": -1.75} for t in tokens[:-1]]
            choice["logprobs"] = {"top_logprobs": [*top, {f"token_id:{tokens[-1]}": -0.5}]}
        answer = {"choices": [choice]}
        if first == 15:
            answer["usage"] = {"prompt_tokens_details": {"cached_tokens": 96}}
        if first == 16:
            answer["usage"] = {"prompt_tokens_details": None}
        return self._answer(200, json.dumps(answer).encode())

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("concurrency", [1, 3, None])
def test_answers_come_in_the_order_of_the_prompts(url, concurrency):
    seen = []
    prompts = [[100 * i + 100] for i in range(8)]
    done = complete(
        url, prompts, max_tokens=3, model="m", concurrency=concurrency, on_done=seen.append
    )
    assert [c.tokens for c in done] == [(p[0], p[0] + 1, p[0] + 2) for p in prompts]
    assert [c.index for c in done] == list(range(8))
    assert all(c.error is None and c.started_seconds <= c.ended_seconds for c in done)
    assert sorted(c.index for c in seen) == list(range(8))


def test_no_prompts_no_answers(url):
    assert complete(url, [], max_tokens=3, model="m") == []


def test_failures_are_values(url):
    died, short, fine = complete(url, [[13], [14], [15]], max_tokens=2, model="m")
    assert "status 500" in (died.error or "")
    assert died.tokens == ()
    assert short.error == "1 tokens came, 2 were asked for"
    assert fine.error is None


def test_nobody_listening_is_a_value():
    (done,) = complete("http://127.0.0.1:9", [[1]], max_tokens=1, model="m")
    assert "ConnectionRefusedError" in (done.error or "")


def test_metrics_are_summed_over_labels(url):
    assert metric(url, "vllm:num_preemptions_total") == 7
    with pytest.raises(KeyError):
        metric(url, "vllm:nothing")


def test_post(url):
    post(url, "/reset_prefix_cache")
    with pytest.raises(http.client.HTTPException, match="404"):
        post(url, "/missing")


def test_prompts_are_the_same_every_time_and_hold_no_special_token():
    prompts = random_prompts(3, 4, 50)
    assert prompts == random_prompts(3, 4, 50) != random_prompts(4, 4, 50)
    assert {len(p) for p in prompts} == {50}
    assert min(min(p) for p in prompts) >= 3


def test_texts_are_asked_as_they_are(url):
    (done,) = complete(url, ["a text of 22 letters.."], max_tokens=2, model="m")
    assert done.tokens == (22, 23)


def test_what_the_cache_had_is_told_where_the_server_says_it(url):
    done = complete(url, [[15], [16], [17]], max_tokens=2, model="m")
    assert [c.cached_tokens for c in done] == [96, None, None]


def test_margins_name_the_second_best_and_how_far_behind_it_was(url):
    (done,) = complete(url, [[20]], max_tokens=3, model="m", margins=True)
    assert done.tokens == (20, 21, 22)
    assert done.margins == ((21, 1.5), (22, 1.5), (-1, float("inf")))
    (plain,) = complete(url, [[20]], max_tokens=3, model="m")
    assert plain.margins == ()
