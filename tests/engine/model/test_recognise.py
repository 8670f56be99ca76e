"""What only looks like a fusible layer runs unfused, and gives the model's own logits all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.model import loader
from engine.model.attention import LayerShape
from engine.model.loader import load_model
from engine.model.recognise import recognise
from engine.model.source import resolve_model
from tests.engine.model.paged import Paged

PathOf = Callable[[str], Path]
SHAPE = LayerShape(q_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture
def llama(tiny_model_path: PathOf) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_path("llama")).eval().requires_grad_(False)


def test_a_plain_llama_is_recognised(llama: Any) -> None:
    parts = recognise(llama, SHAPE)
    assert parts is not None
    assert len(parts.layers) == 3
    assert parts.layers[0].scale == 0.25


class PlusOneNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.inner = norm.weight, norm.variance_epsilon, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * (1 + 1 / self.weight)
        return result


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def use_plus_one(model: Any) -> None:
    model.model.layers[1].input_layernorm = PlusOneNorm(model.model.layers[1].input_layernorm)


def use_gelu(model: Any) -> None:
    model.model.layers[2].mlp.act_fn = nn.GELU()


def use_other_linear(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj = Doubling(64, 64)


def use_more_parts(model: Any) -> None:
    model.model.layers[0].post_mlp_norm = nn.LayerNorm(64)


def use_factor(model: Any) -> None:
    model.model.embedding_multiplier = 2.0


def use_gate(model: Any) -> None:
    model.model.layers[0].self_attn.g_proj = nn.Linear(64, 64)


@pytest.mark.parametrize(
    "change", [use_plus_one, use_gelu, use_other_linear, use_more_parts, use_factor, use_gate]
)
def test_one_differing_part_is_enough_not_to_fuse(change: Callable[[Any], None], llama: Any) -> None:
    change(llama)
    assert recognise(llama, SHAPE) is None


def test_another_shape_of_heads_is_not_fused(llama: Any) -> None:
    assert recognise(llama, LayerShape(4, 4, 16)) is None
    assert recognise(llama, LayerShape(8, 4, 8)) is None


def test_dropout_is_overlooked(llama: Any) -> None:
    llama.model.layers[0].resid_dropout = nn.Dropout(0.5)
    assert recognise(llama, SHAPE) is not None


def test_a_wrongly_recognised_model_is_found_out_and_runs_unfused(
    tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here recognition itself is at fault: it takes the scale of the scores for another one."""

    def misled(model: Any, shape: LayerShape) -> Any:
        parts = recognise(model, shape)
        assert parts is not None
        for layer in parts.layers:
            object.__setattr__(layer, "scale", layer.scale * 1.5)
        return parts

    source = resolve_model(str(tiny_model_path("llama")))
    right = load_model(source, dtype="float32", device="cpu")
    monkeypatch.setattr(loader, "recognise", misled)
    with caplog.at_level(logging.WARNING):
        model = load_model(source, dtype="float32", device="cpu")
    assert (right.spec.fused, model.spec.fused) == (True, False)
    assert "runs unfused" in caplog.text
    ids = {"prompt": list(range(3, 30))}
    torch.testing.assert_close(Paged(model).step(ids)["prompt"], Paged(right).step(ids)["prompt"])
