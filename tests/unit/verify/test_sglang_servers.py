"""SGLang's servers: how they are started, and what their answers say."""

import http.server
import json
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from kvtide.errors import KvtideError, UsageError
from kvtide.units import MIB
from kvtide.verify import servers
from kvtide.verify.engines import ENGINES, find_engine
from kvtide.verify.servers import Options
from kvtide.verify.sglang_servers import SGLangServer

# 8 KiB a token in float32: 4 layers, 8 heads of 32 numbers, keys and values.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


class Handler(http.server.BaseHTTPRequestHandler):
    """Continues a prompt by its own last id; 7 fails, and 8 ends early."""

    asked: ClassVar[list] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.path, json.loads(body) if body else None))
        if self.path.startswith("/flush_cache"):
            return self._answer({})
        request = self.asked[-1][1]
        last, count = request["input_ids"][-1], request["sampling_params"]["max_new_tokens"]
        if last == 7:
            return self._answer({"error": "no"}, 500)
        tokens = [last] * (count - (last == 8))
        meta = {"finish_reason": {"type": "length"}, "cached_tokens": len(request["input_ids"]) - 1}
        if request.get("return_logprob"):
            assert request["top_logprobs_num"] == 2
            meta["output_top_logprobs"] = [[[-0.5, last, None], [-2.0, 99, None]] for _ in tokens]
        return self._answer({"output_ids": tokens, "meta_info": meta})

    def _answer(self, content, status=200):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def test_the_port_of_its_ranks_is_not_one_that_the_kernel_gives_away_meanwhile(tmp_path):
    server = SGLangServer(tmp_path, log=tmp_path / "log")
    command = server._command
    port = int(command[command.index("--nccl-port") + 1])
    assert port in servers._PORTS
    assert port != server.port


@pytest.fixture
def server(tmp_path):
    Handler.asked = []
    fake = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    server = SGLangServer(tmp_path, log=tmp_path / "log")
    server.port = fake.server_address[1]
    yield server
    fake.shutdown()
    fake.server_close()
    thread.join()


def test_answers_have_tokens_cached_tokens_and_what_failed(server):
    answers = server.ask([[1, 2, 3], [4, 7], [5, 8]], 4)
    assert [a.index for a in answers] == [0, 1, 2]
    assert answers[0].tokens == (3, 3, 3, 3)
    assert [a.cached_tokens for a in answers] == [2, None, 1]
    assert answers[0].error is None
    assert answers[1].error.startswith("status 500")
    assert answers[2].error.startswith("3 tokens")
    assert answers[0].margins == ()


def test_margins_name_the_second_best_and_how_far_behind_it_was(server):
    (answer,) = server.ask([[1, 3]], 2, margins=True)
    assert answer.margins == ((99, 1.5), (99, 1.5))


def test_the_cache_is_flushed_once_the_server_is_idle(server):
    server.drop_cache()
    assert Handler.asked == [("/flush_cache?timeout=30", None)]


def value(flags, name):
    return flags[flags.index(name) + 1]


def test_a_size_in_bytes_is_given_in_tokens(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    flags = SGLangServer.flags(Options("float32", 2048, kv_bytes=64 * MIB), tmp_path)
    assert value(flags, "--dtype") == "float32"
    assert value(flags, "--context-length") == "2048"
    # One token is the padding that SGLang adds.
    assert int(value(flags, "--max-total-tokens")) == 8191
    split = SGLangServer.flags(Options("float32", 2048, tp=2, kv_bytes=64 * MIB), tmp_path)
    assert int(value(split, "--max-total-tokens")) == 2 * 8192 - 1
    half = SGLangServer.flags(Options("bfloat16", 2048, "fp8", kv_bytes=64 * MIB), tmp_path)
    assert value(half, "--kv-cache-dtype") == "fp8_e4m3"
    assert int(value(half, "--max-total-tokens")) == 4 * 8192 - 1
    with pytest.raises(KvtideError, match="smallest"):
        SGLangServer.flags(Options("float32", 2048, kv_bytes=2 * MIB), tmp_path)


def test_without_a_size_it_is_a_share_of_the_device():
    flags = SGLangServer.flags(Options("float32", 2048), Path("none"))
    assert "--max-total-tokens" not in flags
    assert value(flags, "--mem-fraction-static") == "0.9"
    assert SGLangServer.environ_for(Options("float32", 1), "host") == {}
    ranks = SGLangServer.environ_for(Options("float32", 1, tp=2), "host")
    assert ranks == {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_engines_are_found_by_name_and_refused_where_they_cannot_be_checked():
    assert list(ENGINES) == ["vllm", "sglang"]
    assert find_engine("sglang", "host") is SGLangServer
    with pytest.raises(UsageError, match="sglang is checked on host alone"):
        find_engine("sglang", "cuda")
