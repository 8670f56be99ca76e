"""Find in any model of transformers the decoder layers that can be fused: by their structure, not by their
name.

A layer is recognised when it is made of exactly these parts: RMSNorm, attention of q/k/v/o projections (with
or without biases, with or without a norm of every query and key head), RMSNorm, and a gated SiLU network,
each added to what came in. What structure cannot show (a scale here or there) shows when the fused model is
compared with the original one, see `engine.model.probe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.model import ops
from engine.model.attention import LayerShape


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: weight [width]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of one recognised layer, still the model's own modules.

    qkv, gate_up: the projections whose rows follow one another in the fused matrix.
    """

    attention_norm: Norm
    qkv: list[nn.Linear]
    q_norm: Norm | None
    k_norm: Norm | None
    out: nn.Linear
    mlp_norm: Norm
    gate_up: list[nn.Linear]
    down: nn.Linear
    scale: float


@dataclass(frozen=True, slots=True)
class Parts:
    """A recognised model: token embedding, rotation, layers, last norm, head."""

    embedding: nn.Embedding
    rotary: nn.Module
    layers: list[Layer]
    norm: Norm
    head: nn.Linear


class _Unlike(Exception):
    """Some part is not what a fused decoder has in its place."""


def recognise(model: Any, shape: LayerShape) -> Parts | None:
    """The model's parts if all of it can be fused, else None.

    model: a causal language model of transformers; shape: of its attention, the same in all layers.
    """
    try:
        top = _children(model, {"model", "lm_head"})
        base = _children(top["model"], {"embed_tokens", "layers", "norm", "rotary_emb"})
        embedding, rotary = base["embed_tokens"], base["rotary_emb"]
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
            raise _Unlike
        if _rotated_dims(rotary, embedding.weight) != shape.head_dim:
            raise _Unlike
        layers = [_layer(layer, shape) for layer in base["layers"].children()]
        return Parts(embedding, rotary, layers, _norm(base["norm"]), _linear(top["lm_head"]))
    except _Unlike:
        return None


def _layer(module: nn.Module, shape: LayerShape) -> Layer:
    parts = _children(module, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
    qkv = _projections(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    gate_up = _projections(mlp, ("gate_proj", "up_proj"), "gate_up_proj")
    out, down = _linear(attention.pop("o_proj", None)), _linear(mlp.pop("down_proj", None))
    q_norm, k_norm = (_head_norm(attention.pop(name, None), shape) for name in ("q_norm", "k_norm"))
    if _busy(attention) or len(mlp) != 1 or not all(map(_is_silu, mlp.values())):
        raise _Unlike
    if sum(linear.out_features for linear in qkv) != (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim:
        raise _Unlike
    scale = getattr(parts["self_attn"], "scaling", None)
    return Layer(
        _norm(parts["input_layernorm"]),
        qkv,
        q_norm,
        k_norm,
        out,
        _norm(parts["post_attention_layernorm"]),
        gate_up,
        down,
        shape.head_dim**-0.5 if scale is None else float(scale),
    )


def _children(module: nn.Module, names: set[str]) -> dict[str, nn.Module]:
    """The module's parts, which must be just these; and it may keep no number to scale anything by."""
    children = _busy(dict(module.named_children()))
    if set(children) != names or any(isinstance(value, float) for value in vars(module).values()):
        raise _Unlike
    return children


def _busy(children: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The parts that do something: dropout does nothing outside training."""
    return {name: child for name, child in children.items() if not isinstance(child, nn.Dropout)}


def _projections(children: dict[str, nn.Module], names: tuple[str, ...], joined: str) -> list[nn.Linear]:
    """Take the projections out of `children`: one each, or all of them in one already."""
    found = (joined,) if joined in children else names
    return [_linear(children.pop(name, None)) for name in found]


def _linear(module: nn.Module | None) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise _Unlike
    return module


def _norm(module: nn.Module) -> Norm:
    """The module as an RMSNorm if it computes one: tried, as a norm may well add one to its weight."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        raise _Unlike
    x = torch.linspace(-2.0, 3.0, weight.shape[0], device=weight.device).to(weight.dtype)[None]
    expected = torch.empty_like(x)
    ops.rms_norm(x, weight, eps, expected)
    if not torch.allclose(module(x), expected, rtol=1e-2, atol=1e-4):
        raise _Unlike
    return Norm(weight.detach(), eps)


def _head_norm(module: nn.Module | None, shape: LayerShape) -> Norm | None:
    """A norm of every single head, if there is one; one across all heads is another thing."""
    norm = None if module is None else _norm(module)
    if norm is not None and norm.weight.shape != (shape.head_dim,):
        raise _Unlike
    return norm


def _is_silu(module: nn.Module) -> bool:
    x = torch.linspace(-6.0, 6.0, 101)
    found = module(x)
    return found.shape == x.shape and torch.allclose(found, functional.silu(x), atol=1e-5)


def _rotated_dims(rotary: nn.Module, like: torch.Tensor) -> int:
    """How many dimensions of a head the model rotates."""
    cos, _ = rotary(like[None, :1], torch.zeros(1, 1, dtype=torch.int64, device=like.device))
    return int(cos.shape[-1])
