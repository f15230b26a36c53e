"""What transformers writes anew says the same in other words, and is planned alike."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvtide.sizing.model import read_model

transformers = pytest.importorskip("transformers")

# It warns of what published files hold.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

CONFIGS = sorted((Path(__file__).parents[2] / "data" / "configs").glob("*.json"))
# Their classes come with the model, not with transformers.
REMOTE = ("kimi_k2", "minimax_text_01")


@pytest.mark.parametrize("published", CONFIGS, ids=lambda path: path.stem)
def test_a_rewritten_configuration_is_planned_alike(published, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    config = json.loads(published.read_text())
    model_type = config["model_type"]
    if model_type in REMOTE:
        with pytest.raises(ValueError, match=model_type):
            transformers.AutoConfig.for_model(model_type)
        return
    (tmp_path / "config.json").write_text(published.read_text())
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "transformers_version" in (tmp_path / "config.json").read_text()

    as_published, rewritten = read_model(published), read_model(tmp_path)
    assert rewritten.layers == as_published.layers
    assert rewritten.shared == as_published.shared
    assert rewritten.num_layers == as_published.num_layers
    assert rewritten.own_drafts == as_published.own_drafts
    assert rewritten.dtype == as_published.dtype
    assert rewritten.max_model_len == as_published.max_model_len
