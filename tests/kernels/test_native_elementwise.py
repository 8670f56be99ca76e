"""The fused element-wise operations against the modules of transformers that they replace."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kernels import native
from tests.kernels.cases import poisoned

ISAS = ("baseline", "avx2", "avx512", "avx512bf16")
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = (1, 3, 400)

pytestmark = pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = native.features()
    if request.param not in best.runnable:
        pytest.skip(f"this CPU does not run {request.param}")
    native._library().choose_isa(request.param)
    yield request.param
    native._library().choose_isa(best.isa)


def assert_within_ulps(result: torch.Tensor, expected: torch.Tensor, ulps: int) -> None:
    """At most so many steps of the dtype between the two, wherever the zero lies."""
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[result.dtype]

    def steps(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(whole).long()
        return torch.where(bits < 0, -(bits & torch.iinfo(whole).max), bits)

    assert not result.isnan().any()
    worst = (steps(result) - steps(expected)).abs().max().item()
    assert worst <= ulps, f"{worst} ulp apart"


def norm_of(weight: torch.Tensor, eps: float) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(weight.numel(), eps).to(weight.dtype)
    norm.weight.data = weight
    return norm


def assert_as_good_as_transformers(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """The mean is summed in another order. So float32 is held against float64 (transformers is 4 ulp away),
    and in bfloat16 a normalised value may fall to the other side of a rounding border."""
    if x.dtype is torch.float32:
        wide = x.double()
        exact = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))
        assert_within_ulps(out, exact.float(), 6)
    else:
        assert_within_ulps(out, norm_of(weight, eps)(x).detach(), 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 24, 576, 1000, 4096])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm(isa, seed, tokens, width, dtype):
    torch.manual_seed(seed)
    x, weight = (torch.randn(tokens, width) * 3).to(dtype), torch.randn(width).to(dtype)
    out = poisoned(x)
    assert native.rms_norm(x, weight, 1e-5, out) is out
    assert_as_good_as_transformers(out, x, weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 576, 1000])
def test_rms_norm_adds_to_the_residual_first(isa, seed, width, dtype):
    torch.manual_seed(seed)
    x, residual = torch.randn(2, 5, width).to(dtype)
    weight = torch.ones(width, dtype=dtype)
    total = x + residual
    out = poisoned(x)
    native.rms_norm(x, weight, 1e-6, out, residual=residual)
    assert torch.equal(residual, total)
    assert_as_good_as_transformers(out, total, weight, 1e-6)


def test_rms_norm_of_strided_rows_in_place(seed):
    torch.manual_seed(seed)
    wide = torch.randn(6, 100)
    before = wide.clone()
    x = wide[:, 10:74]
    native.rms_norm(x, torch.ones(64), 1e-6, x)
    assert_as_good_as_transformers(x, before[:, 10:74], torch.ones(64), 1e-6)
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 74:], before[:, 74:])


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 96), (2, 2, 256)]
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_write_kv(isa, seed, tokens, q_heads, kv_heads, head_dim, dtype, with_norms):
    torch.manual_seed(seed)
    block_size, blocks = 16, -(-tokens // 16) + 4
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = (torch.rand(tokens, head_dim // 2) * 1000).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = torch.full((blocks, 3, 2, block_size, kv_heads, head_dim), 7.0, dtype=dtype)
    slots = torch.randperm(blocks * block_size)[:tokens]
    norms = torch.randn(2, head_dim).to(dtype) if with_norms else (None, None)
    out_q = torch.full((tokens, q_heads, head_dim), torch.nan, dtype=dtype)

    result = native.rope_write_kv(
        qkv, cos, sin, pool[:, 1], slots, q_heads, out_q, q_norm=norms[0], k_norm=norms[1], eps=1e-6
    )

    assert result is out_q
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([q_heads, kv_heads, kv_heads], dim=1)
    if with_norms:
        q, k = norm_of(norms[0], 1e-6)(q).detach(), norm_of(norms[1], 1e-6)(k).detach()
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    written = pool[slots // block_size, 1, :, slots % block_size]
    assert torch.equal(written[:, 1], v)
    if with_norms:
        # The sum of two products can cancel, so a unit of the normalised value is what may be apart.
        step = 1e-5 if dtype is torch.float32 else 4e-2
        torch.testing.assert_close(out_q, q, rtol=step, atol=step)
        torch.testing.assert_close(written[:, 0], k, rtol=step, atol=step)
    else:
        assert torch.equal(out_q, q)
        assert torch.equal(written[:, 0], k)
    assert (pool[:, 0] == 7).all()
    assert (pool[:, 2] == 7).all()
    untouched = torch.ones(blocks * block_size, dtype=torch.bool).index_fill(0, slots, False)
    assert (pool[:, 1].permute(0, 2, 1, 3, 4).flatten(0, 1)[untouched] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 24, 1000, 1536])
@pytest.mark.parametrize("tokens", TOKENS)
def test_silu_mul(isa, seed, tokens, inner, dtype):
    torch.manual_seed(seed)
    gate_up = (torch.randn(tokens, 2 * inner) * 5).to(dtype)
    out = torch.full((tokens, inner), torch.nan, dtype=dtype)
    assert native.silu_mul(gate_up, out) is out
    gate, up = gate_up.chunk(2, dim=1)
    assert_within_ulps(out, torch.nn.functional.silu(gate) * up, 4 if dtype is torch.float32 else 1)


def test_silu_of_extreme_gates(isa):
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("nan")]])
    out = torch.empty_like(gate)
    native.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1), out)
    torch.testing.assert_close(out[:, :-1], torch.nn.functional.silu(gate)[:, :-1], rtol=1e-6, atol=1e-6)
    assert out[0, -1].isnan()


X = torch.zeros(4, 32)
KV = torch.zeros(2, 2, 8, 1, 8)


def rope(**changed: Any) -> None:
    arguments: dict[str, Any] = {
        "qkv": X,
        "cos": torch.ones(4, 8),
        "sin": torch.ones(4, 8),
        "kv": KV,
        "slots": torch.arange(4),
        "q_heads": 2,
        "out_q": torch.zeros(4, 2, 8),
    }
    native.rope_write_kv(**(arguments | changed))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: native.rms_norm(X[0], X[0], 1e-6, X[0])),
        ("x", lambda: native.rms_norm(X.double(), X[0].double(), 1e-6, X.double())),
        ("weight", lambda: native.rms_norm(X, X[0, :8], 1e-6, X)),
        ("weight", lambda: native.rms_norm(X, X[0].bfloat16(), 1e-6, X)),
        ("out", lambda: native.rms_norm(X, X[0], 1e-6, X[:2])),
        ("residual", lambda: native.rms_norm(X, X[0], 1e-6, X, residual=X[:, :8])),
        ("qkv", lambda: rope(q_heads=3)),
        ("qkv", lambda: rope(kv=KV.bfloat16())),
        ("cos", lambda: rope(cos=torch.ones(4, 4))),
        ("sin", lambda: rope(sin=torch.ones(4, 8, dtype=torch.bfloat16))),
        ("slots", lambda: rope(slots=torch.arange(3))),
        ("slots", lambda: rope(slots=torch.arange(4, dtype=torch.int32))),
        ("out_q", lambda: rope(out_q=torch.zeros(4, 16))),
        ("q_norm", lambda: rope(q_norm=torch.ones(4))),
        ("k_norm", lambda: rope(k_norm=torch.ones(8, dtype=torch.bfloat16))),
        ("gate_up", lambda: native.silu_mul(X[:, :31], X)),
        ("out", lambda: native.silu_mul(X, X)),
    ],
)
def test_bad_arguments_are_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        call()
