"""The CPU back end: C++ compiled on this machine, running on torch's own threads.

`available()` compiles and loads it at the first call. Everything here takes CPU tensors of float32 or
bfloat16, sums in float32, and writes into tensors that the caller gives; nothing else is allocated.

Attention of a sequence gives the same bits whatever else is in the batch and however many threads there are.
"""

from __future__ import annotations

import threading
import warnings
from struct import Struct
from typing import TYPE_CHECKING

import torch

from kernels.native.build import BuildError
from kernels.native.library import Features, Library

if TYPE_CHECKING:
    from kernels.attention import PagedBatch

__all__ = [
    "Features",
    "available",
    "features",
    "paged_attention",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
    "supports",
    "write_kv",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}

# The records of call.h.
_BATCH = "5q"
_POOL = "7q"
_ATTENTION = Struct(_BATCH + _POOL + "8qd")
_WRITE = Struct(_POOL + "9q")
_NORM = Struct("9qd")
_ROPE = Struct(_POOL + "14qd")
_SILU = Struct("6q")


class _State:
    """The library, once somebody asked for it. `failed`: it can't be had, which has been said."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.library: Library | None = None
        self.failed = False


_state = _State()
# The batch of the last call and its packed fields: one batch serves all layers of a step.
_last_batch: tuple[PagedBatch | None, tuple[int, int, int, int, int]] = (None, (0, 0, 0, 0, 0))


def available() -> bool:
    """Whether the library is there. The first call compiles it if need be (seconds) and warns if that fails.

    Raises ValueError when PAGETURNER_NATIVE_ISA names an instruction set that this CPU doesn't run.
    """
    if _state.library is None and not _state.failed:
        with _state.lock:
            if _state.library is None and not _state.failed:
                try:
                    _state.library = Library()
                except (BuildError, OSError) as error:
                    _state.failed = True
                    warnings.warn(
                        f"native CPU kernels are not available, torch takes over (slower): {error}",
                        RuntimeWarning,
                        stacklevel=2,
                    )
    return _state.library is not None


def features() -> Features:
    """What was picked for this CPU. Raises RuntimeError when the library can't be had."""
    return _library().features()


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention runs for these: float32 and bfloat16; head_dim a multiple of 8 up to 256.

    A multiple of 32 uses the widest vectors.
    """
    return dtype in _DTYPES and available() and _library().supports_head_dim(head_dim)


def paged_attention(
    query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float, out: torch.Tensor
) -> None:
    """See `kernels.attention.paged_attention`, which has checked the arguments.

    In bfloat16 the weights of the values are rounded to bfloat16 where the CPU multiplies bfloat16 itself
    (avx512bf16); otherwise they stay float32.
    """
    head_dim = query.size(2)
    query_token_stride, query_head_stride, _ = query.stride()
    out_token_stride, out_head_stride, _ = out.stride()
    call = _ATTENTION.pack(
        *_batch_fields(batch),
        *_pool_fields(kv),
        query.data_ptr(),
        out.data_ptr(),
        query_token_stride,
        query_head_stride,
        out_token_stride,
        out_head_stride,
        query.size(1) // kv.size(3),
        head_dim,
        scale,
    )
    if _library().attention(call, _dtype_code("query", query)):
        raise MemoryError("no memory for the workspace of paged attention")


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """See `kernels.attention.write_kv`, which has checked the arguments."""
    itemsize = kv.element_size()
    data, *strides, block_size, kv_heads = _pool_fields(kv)
    key_token_stride, key_head_stride, _ = key.stride()
    value_token_stride, value_head_stride, _ = value.stride()
    call = _WRITE.pack(
        data,
        *(stride * itemsize for stride in strides),
        block_size,
        kv_heads,
        key.data_ptr(),
        value.data_ptr(),
        _dense("slots", slots),
        key_token_stride * itemsize,
        key_head_stride * itemsize,
        value_token_stride * itemsize,
        value_head_stride * itemsize,
        key.size(0),
        key.size(2) * itemsize,
    )
    _library().write_kv(call, 0)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = weight * (x / sqrt(mean(x^2) + eps)), over the last dimension; returns out.

    x, out: [tokens, width], out may be x; weight: [width]. With residual [tokens, width]: residual += x
    first, in place, and the sum is normalised. Rounds where transformers' Llama RMSNorm does; only the
    order of the mean's sum differs. Raises ValueError naming the argument that doesn't fit.
    """
    tokens, width = _check_matrix("x", x)
    _check_like("out", out, x)
    _check_vector("weight", weight, width, x)
    if residual is not None:
        _check_like("residual", residual, x)
    call = _NORM.pack(
        x.data_ptr(),
        weight.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        tokens,
        width,
        eps,
    )
    _library().rms_norm(call, _dtype_code("x", x))
    return out


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
) -> torch.Tensor:
    """Rotates queries and keys (rotate-half convention), writes keys and values into the pool; returns out_q.

    qkv:            [tokens, (q_heads + 2 * kv_heads) * head_dim], queries, then keys, then values
    cos, sin:       [tokens, head_dim], as transformers' rotary embeddings give them, in qkv's dtype
    kv:             [blocks, 2, block_size, kv_heads, head_dim], one layer's slice of the pool
    slots:          int64 [tokens], block * block_size + offset
    out_q:          [tokens, q_heads, head_dim], dense but for the first dimension
    q_norm, k_norm: [head_dim] or None: RMSNorm of each head before the rotation (Qwen3), with eps

    Without norms the bits are those of transformers' `apply_rotary_pos_emb`, in both dtypes.
    Raises ValueError naming the argument that doesn't fit.
    """
    tokens, width = _check_matrix("qkv", qkv)
    kv_heads, head_dim = kv.size(3), kv.size(4)
    if width != (q_heads + 2 * kv_heads) * head_dim or kv.dtype != qkv.dtype or kv.stride(4) != 1:
        raise ValueError(
            f"qkv must be [tokens, {(q_heads + 2 * kv_heads) * head_dim}] of kv's dtype {kv.dtype}, "
            f"got {list(qkv.shape)} {qkv.dtype}"
        )
    if not _library().supports_head_dim(head_dim):
        raise ValueError(f"head_dim must be a multiple of 8 up to 256, got {head_dim}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (tokens, head_dim) or table.dtype != qkv.dtype or table.stride(1) != 1:
            raise ValueError(
                f"{name} must be [{tokens}, {head_dim}] {qkv.dtype}, got {list(table.shape)} {table.dtype}"
            )
    if slots.dtype != torch.int64 or slots.shape != (tokens,):
        raise ValueError(f"slots must be int64 [{tokens}], got {slots.dtype} {list(slots.shape)}")
    if (
        out_q.shape != (tokens, q_heads, head_dim)
        or out_q.dtype != qkv.dtype
        or out_q.stride()[1:] != (head_dim, 1)
    ):
        raise ValueError(
            f"out_q must be [{tokens}, {q_heads}, {head_dim}] {qkv.dtype} with dense tokens, "
            f"got {list(out_q.shape)} {out_q.dtype}"
        )
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            _check_vector(name, weight, head_dim, qkv)
    call = _ROPE.pack(
        *_pool_fields(kv),
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        _dense("slots", slots),
        out_q.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        out_q.stride(0),
        tokens,
        q_heads,
        head_dim,
        eps,
    )
    _library().rope_write_kv(call, _dtype_code("qkv", qkv))
    return out_q


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) * up; returns out. gate_up: [tokens, 2 * inner], gate first; out: [tokens, inner].

    silu is rounded to the dtype before the product, as the unfused code does it; in float32 within 4 ulp.
    Raises ValueError naming the argument that doesn't fit.
    """
    tokens, width = _check_matrix("gate_up", gate_up)
    if width % 2:
        raise ValueError(f"gate_up must be [tokens, 2 * inner], got {list(gate_up.shape)}")
    if out.shape != (tokens, width // 2) or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(
            f"out must be [{tokens}, {width // 2}] {gate_up.dtype}, got {list(out.shape)} {out.dtype}"
        )
    call = _SILU.pack(
        gate_up.data_ptr(), out.data_ptr(), gate_up.stride(0), out.stride(0), tokens, width // 2
    )
    _library().silu_mul(call, _dtype_code("gate_up", gate_up))
    return out


def _library() -> Library:
    if _state.library is None and not available():
        raise RuntimeError("native CPU kernels are not available on this machine")
    assert _state.library is not None
    return _state.library


def _batch_fields(batch: PagedBatch) -> tuple[int, int, int, int, int]:
    global _last_batch
    last, fields = _last_batch
    if last is batch:
        return fields
    fields = (
        _dense("block_tables", batch.block_tables),
        _dense("query_starts", batch.query_starts),
        _dense("kv_lens", batch.kv_lens),
        batch.block_tables.stride(0),
        batch.kv_lens.numel(),
    )
    # Held, not only named: while it is here no other batch can have its identity.
    _last_batch = (batch, fields)
    return fields


def _pool_fields(kv: torch.Tensor) -> tuple[int, int, int, int, int, int, int]:
    block_stride, half_stride, token_stride, head_stride, _ = kv.stride()
    return kv.data_ptr(), block_stride, half_stride, token_stride, head_stride, kv.size(2), kv.size(3)


def _dense(name: str, tensor: torch.Tensor) -> int:
    if tensor.stride(-1) != 1 and tensor.size(-1) > 1:
        raise ValueError(f"{name} must be dense in its last dimension, got strides {tensor.stride()}")
    return tensor.data_ptr()


def _dtype_code(name: str, tensor: torch.Tensor) -> int:
    code = _DTYPES.get(tensor.dtype)
    if code is None or not tensor.is_cpu:
        raise ValueError(
            f"{name} must be a float32 or bfloat16 tensor on the CPU, got {tensor.dtype} on {tensor.device}"
        )
    return code


def _check_matrix(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dim() != 2 or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be two-dimensional with a dense last dimension, got {list(tensor.shape)}"
        )
    return tensor.size(0), tensor.size(1)


def _check_like(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be {list(like.shape)} {like.dtype}, got {list(tensor.shape)} {tensor.dtype}"
        )


def _check_vector(name: str, tensor: torch.Tensor, width: int, like: torch.Tensor) -> None:
    if tensor.shape != (width,) or tensor.dtype != like.dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be [{width}] {like.dtype}, got {list(tensor.shape)} {tensor.dtype}")
