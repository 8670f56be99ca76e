"""Models that could not be served exactly are refused, by the name of the config field."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from engine.model.loader import load_model
from engine.model.source import resolve_model
from engine.model.support import UnsupportedModel, check_config
from tests.engine.model.tiny import ROPE, SIZE, save_random


def config(name: str, **values: Any) -> Any:
    return getattr(transformers, name)(**{**SIZE, **values})


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {**YARN, "rope_type": "dynamic"}


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("Gemma2Config", {"head_dim": 16}, "config.attn_logit_softcapping"),
        ("T5Config", {}, "config.is_encoder_decoder"),
        ("MistralConfig", {"sliding_window": 100}, "config.sliding_window=100"),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
            "config.sliding_window",
        ),
        ("Qwen3NextConfig", {}, "config.layer_types holds 'linear_attention'"),
        ("LlamaConfig", {"rope_parameters": DYNAMIC}, "config.rope_parameters"),
        ("LlamaConfig", {"is_causal": False}, "config.is_causal"),
        ("LlamaConfig", {"use_bidirectional_attention": True}, "config.use_bidirectional_attention"),
    ],
)
def test_a_config_is_refused_by_its_field(name: str, values: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel) as error:
        check_config(config(name, **values), None)
    assert str(error.value).startswith(field)


def test_a_config_must_say_how_long_a_context_may_be() -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.max_position_embeddings"):
        check_config(SimpleNamespace(), None)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("LlamaConfig", {}),
        ("LlamaConfig", {"rope_parameters": YARN}),
        ("MistralConfig", {"sliding_window": None}),
        ("MistralConfig", {"sliding_window": 256}),
        ("Qwen2Config", {"sliding_window": 100}),
        ("Qwen3Config", {}),
        ("Phi3Config", {"rope_parameters": ROPE}),
    ],
)
def test_full_attention_is_served_to_the_models_own_length(name: str, values: dict[str, Any]) -> None:
    assert check_config(config(name, **values), None) == 256


def test_a_rotation_that_no_context_changes_is_no_obstacle() -> None:
    assert check_config(config("LlamaConfig", rope_parameters=DYNAMIC), 64) == 256


def test_a_window_no_context_outgrows_is_no_obstacle() -> None:
    windowed = config("MistralConfig", sliding_window=100)
    assert check_config(windowed, 100) == 256
    with pytest.raises(UnsupportedModel, match="max_model_len=100 or less"):
        check_config(windowed, 101)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("GptOssConfig", {"layer_types": ["full_attention"] * 3, "head_dim": 16}, "attention sinks"),
        ("BloomConfig", {"n_layer": 3, "n_head": 4, "n_positions": 256}, "attention interface"),
    ],
)
def test_what_the_config_does_not_show_is_seen_when_the_model_runs(
    name: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_random(name, values, tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=words):
        load_model(resolve_model(str(tmp_path / "model")), dtype="float32", device="cpu")
