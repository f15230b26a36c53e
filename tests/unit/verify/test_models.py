"""Tiny models: the same bytes every time, and tokens that depend on all of their context."""

import hashlib

import pytest

from kvtide.errors import UsageError
from kvtide.verify.client import random_prompts
from kvtide.verify.models import KINDS, dtype_of, ensure_model, main, make_model


def test_bad_words_are_refused_before_torch_is_needed(tmp_path):
    with pytest.raises(UsageError, match="'gpt2' is not a kind"):
        make_model("gpt2", tmp_path / "m")
    with pytest.raises(UsageError, match="'int4' is not a dtype"):
        make_model("llama", tmp_path / "m", dtype="int4")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        make_model("llama", tmp_path / "full")


def test_the_command_ends_with_2_where_the_directory_is_full(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["llama", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.torch
def test_the_same_bytes_twice_and_others_for_another_seed(tmp_path):
    first = ensure_model("llama", tmp_path / "one")
    assert ensure_model("llama", tmp_path / "one") == first
    second = ensure_model("llama", tmp_path / "two")
    other = ensure_model("llama", tmp_path / "one", seed=2)
    assert _digest(first) == _digest(second)
    assert _digest(first)["tokenizer.json"] == _digest(other)["tokenizer.json"]
    assert _digest(first)["model.safetensors"] != _digest(other)["model.safetensors"]
    assert not list((tmp_path / "one").glob(".*"))


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_depend_on_every_part_of_the_context(tmp_path, kind):
    import torch
    from transformers import AutoModelForCausalLM

    directory = ensure_model(kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    whole = torch.tensor(random_prompts(1, 4, 96))
    torn = whole.clone()
    torn[:, 32:64] = torch.tensor(random_prompts(2, 4, 32))  # one block of the cache
    with torch.no_grad():
        expected, found = (_continue(model, prompts) for prompts in (whole, torn))
    assert dtype_of(kind) in ("float32", "bfloat16")
    assert bool((expected != found).any(dim=1).all()), "a block that is torn leaves tokens alone"


def _continue(model, prompts):
    new = 16
    done = model.generate(prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return done[:, prompts.shape[1] :]


def _digest(directory):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}
