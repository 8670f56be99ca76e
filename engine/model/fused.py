"""The recognised decoder as few, large operations: four matrix products and five small ones a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.model import ops
from engine.model.attention import LayerShape
from engine.model.linear import Linear, make_linear
from engine.model.recognise import Layer, Norm, Parts
from kernels import native
from kernels.attention import PagedBatch, paged_attention


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's weights in their fused form."""

    attention_norm: Norm
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    head_eps: float
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    scale: float


class FusedDecoder:
    """Embedding to logits, without a module call.

    Building it empties the model it is made from, layer by layer, so that the weights are never there twice.
    """

    def __init__(self, parts: Parts, shape: LayerShape) -> None:
        self.shape = shape
        self._embedding = parts.embedding.weight.detach()
        self._vocab_size = parts.head.out_features
        self._inner = parts.layers[0].down.in_features
        self._layers = [_fuse(layer) for layer in parts.layers]
        self._norm = parts.norm
        self._head = make_linear(parts.head.weight.detach(), _bias(parts.head))
        _empty(parts.head)
        self._ops: Any = _pick_ops(self._embedding, shape)
        self._scratch = _Scratch(self._embedding, shape, self._inner)
        self._rotation = _Rotation(parts.rotary, self._embedding)
        self._pool: torch.Tensor | None = None
        self._pool_layers: list[torch.Tensor] = []

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """See `LoadedModel.forward`."""
        rms_norm, rope_write_kv, silu_mul = self._ops.rms_norm, self._ops.rope_write_kv, self._ops.silu_mul
        q_heads, slots = self.shape.q_heads, batch.slots
        residual = functional.embedding(token_ids, self._embedding)  # [tokens, hidden], added to in place
        cos, sin = self._rotation.at(positions, batch.max_kv_len)  # [tokens, head_dim]
        normed, query, attended, gated = self._scratch.rows(token_ids.shape[0])
        attended_rows = attended.flatten(1)  # [tokens, q_heads * head_dim]
        delta: torch.Tensor | None = None
        for layer, kv in zip(self._layers, self._layers_of(pool), strict=True):
            norm = layer.attention_norm
            if delta is None:
                rms_norm(residual, norm.weight, norm.eps, normed)
            else:
                rms_norm(delta, norm.weight, norm.eps, normed, residual)
            rope_write_kv(
                layer.qkv(normed),
                cos,
                sin,
                kv,
                slots,
                q_heads,
                query,
                layer.q_norm,
                layer.k_norm,
                layer.head_eps,
            )
            paged_attention(query, kv, batch, scale=layer.scale, out=attended)
            if layer is self._layers[-1]:
                # All KV is written: from here on only the rows whose logits are wanted go on.
                rows = last.shape[0]
                if rows == 0:
                    return residual.new_empty(0, self._vocab_size, dtype=torch.float32)
                attended_rows, residual = attended_rows[last], residual[last]
                normed, gated = normed[:rows], gated[:rows]
            norm = layer.mlp_norm
            rms_norm(layer.out(attended_rows), norm.weight, norm.eps, normed, residual)
            silu_mul(layer.gate_up(normed), gated)
            delta = layer.down(gated)
        assert delta is not None
        rms_norm(delta, self._norm.weight, self._norm.eps, normed, residual)
        return self._head(normed).float()

    def _layers_of(self, pool: torch.Tensor) -> list[torch.Tensor]:
        """[blocks, 2, block_size, kv_heads, head_dim] of each layer; cut once, as the pool stays."""
        if pool is not self._pool:
            self._pool, self._pool_layers = pool, list(pool.unbind(1))
        return self._pool_layers


class _Rotation:
    """Sines and cosines of every position so far, by the model's own rotary module."""

    def __init__(self, rotary: nn.Module, like: torch.Tensor) -> None:
        self._rotary, self._like = rotary, like[None, :1]
        self._cos = self._sin = like.new_empty(0, 0)  # [positions, head_dim]

    def at(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [tokens, head_dim] each. length: above all positions."""
        if length > self._cos.shape[0]:
            every = torch.arange(max(1024, 1 << (length - 1).bit_length()), device=positions.device)
            cos, sin = self._rotary(self._like, every[None])
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos[positions], self._sin[positions]


class _Scratch:
    """Room for a step's passing values, kept from step to step.

    Grows to the largest step seen, by powers of two; smaller steps use the first rows of it.
    """

    def __init__(self, like: torch.Tensor, shape: LayerShape, inner: int) -> None:
        self._like = like
        self._widths = (like.shape[1], shape.q_heads * shape.head_dim, shape.q_heads * shape.head_dim, inner)
        self._heads = (shape.q_heads, shape.head_dim)
        self._buffers: list[torch.Tensor] = []
        self._tokens = 0

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """normed [tokens, hidden], query and attended [tokens, q_heads, head_dim], gated [tokens, inner]"""
        if tokens > self._tokens:
            self._tokens = max(16, 1 << (tokens - 1).bit_length())
            self._buffers = [self._like.new_empty(self._tokens, width) for width in self._widths]
        normed, query, attended, gated = (buffer[:tokens] for buffer in self._buffers)
        return normed, query.view(tokens, *self._heads), attended.view(tokens, *self._heads), gated


def _pick_ops(weights: torch.Tensor, shape: LayerShape) -> Any:
    """The module with the element-wise operations: native on a CPU that has them, else plain torch."""
    if weights.device.type == "cpu" and native.supports(weights.dtype, shape.head_dim):
        return native
    return ops


def _fuse(layer: Layer) -> FusedLayer:
    qkv = _join(layer.qkv)
    out = _join([layer.out])
    gate_up = _join(layer.gate_up)
    down = _join([layer.down])
    head_norm = layer.q_norm or layer.k_norm
    return FusedLayer(
        layer.attention_norm,
        qkv,
        layer.q_norm.weight if layer.q_norm else None,
        layer.k_norm.weight if layer.k_norm else None,
        head_norm.eps if head_norm else 0.0,
        out,
        layer.mlp_norm,
        gate_up,
        down,
        layer.scale,
    )


def _join(linears: list[nn.Linear]) -> Linear:
    """One product for all of them, their rows one after another. Their own weights are let go."""
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [_bias(linear) for linear in linears]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
        )
    del weights
    for linear in linears:
        _empty(linear)
    return make_linear(weight, bias)


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def _empty(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
    linear.register_parameter("bias", None)
