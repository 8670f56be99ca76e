"""The small operations against the modules of transformers, and the native ones against the plain ones."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.model import ops
from kernels import native

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["torch", "native"])
def operations(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "native" and not native.available():
        pytest.skip("no compiler on this machine")
    return ops if request.param == "torch" else native


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    rtol = 1e-5 if found.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(operations: ModuleType, dtype: torch.dtype, with_residual: bool) -> None:
    norm = LlamaRMSNorm(72, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(random(72, dtype=dtype))
    x, residual = random(5, 72, dtype=dtype), random(5, 72, dtype=dtype) * 3
    kept = residual.clone()
    out = torch.full_like(x, torch.nan)
    operations.rms_norm(x, norm.weight, 1e-5, out, residual if with_residual else None)
    close(out, norm(x + kept if with_residual else x))
    close(residual, x + kept if with_residual else kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_and_kv_write(operations: ModuleType, dtype: torch.dtype, with_norms: bool) -> None:
    q_heads, kv_heads, head_dim, tokens = 6, 2, 32, 5
    qkv = random(tokens, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = torch.randn(tokens, head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = qkv.clone().view(1, tokens, -1, head_dim).transpose(1, 2)
    query, key, value = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    weights: list[torch.Tensor | None] = [None, None]
    if with_norms:
        norms = [LlamaRMSNorm(head_dim, eps=1e-6).to(dtype).requires_grad_(False) for _ in range(2)]
        for index, norm in enumerate(norms):
            norm.weight.copy_(random(head_dim, dtype=dtype) + index)
        query, key = norms[0](query), norms[1](key)
        weights = [norm.weight for norm in norms]
    query, key = apply_rotary_pos_emb(query, key, cos[None], sin[None])

    pool = torch.full((4, 3, 2, 8, kv_heads, head_dim), torch.nan, dtype=dtype)
    slots = torch.tensor([25, 0, 31, 9, 10])
    out = torch.full((tokens, q_heads, head_dim), torch.nan, dtype=dtype)
    operations.rope_write_kv(qkv, cos, sin, pool[:, 1], slots, q_heads, out, *weights, 1e-6)
    close(out, query[0].transpose(0, 1))
    for token, slot in enumerate(slots.tolist()):
        close(pool[slot // 8, 1, 0, slot % 8], key[0, :, token])
        close(pool[slot // 8, 1, 1, slot % 8], value[0, :, token])
    assert int((~pool.isnan()).sum()) == tokens * 2 * kv_heads * head_dim


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(operations: ModuleType, dtype: torch.dtype) -> None:
    gate_up = random(3, 80, dtype=dtype) * 4
    out = torch.full((3, 40), torch.nan, dtype=dtype)
    operations.silu_mul(gate_up, out)
    close(out, torch.nn.functional.silu(gate_up[:, :40]) * gate_up[:, 40:])
