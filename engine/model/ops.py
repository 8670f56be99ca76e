"""The element-wise parts of a decoder layer in plain torch: any device, any dtype, rounded where transformers
rounds.

`engine.model.fused` takes `kernels.native` instead where that can run; the two have the same functions.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.attention import write_kv


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """out = RMSNorm(x), or residual += x; out = RMSNorm(residual).

    x, out, residual: [..., width]; weight: [width]
    """
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    torch.mul((wide * scale).to(x.dtype), weight, out=out)


def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    q_heads: int,
    out_q: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate queries and keys (halves against each other); keys and values go to their slots, queries to
    `out_q`.

    qkv:   [tokens, (q_heads + 2 * kv_heads) * head_dim], one token's heads in this order
    cos, sin: [tokens, head_dim]
    kv:    [blocks, 2, block_size, kv_heads, head_dim]; slots: int64 [tokens]
    out_q: [tokens, q_heads, head_dim]
    q_norm, k_norm: [head_dim], an RMSNorm of every head before the rotation
    """
    kv_heads = kv.shape[3]
    heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, -1)  # [tokens, heads, head_dim]
    query, key, value = torch.split(heads, [q_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        rms_norm(query, q_norm, eps, query)
    if k_norm is not None:
        rms_norm(key, k_norm, eps, key)
    cos, sin = cos[:, None], sin[:, None]
    torch.add(query * cos, _half_turn(query) * sin, out=out_q)
    write_kv(key * cos + _half_turn(key) * sin, value, kv, slots)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up. gate_up: [tokens, 2 * inner], gate first; out: [tokens, inner]"""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate), up, out=out)


def _half_turn(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
