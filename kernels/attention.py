"""Paged attention: one signature, three back ends.

The KV pool is `[blocks, layers, 2, block_size, kv_heads, head_dim]`; a kernel gets one layer's slice,
`pool[:, layer]`, and takes its strides as they are (int64: a pool is larger than 2 GiB).

A back end is a module with `paged_attention(query, kv, batch, scale, out)` and `write_kv(key, value, kv,
slots)`; it is imported at its first use, so that importing this module brings neither Triton nor a compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, cast

import torch

BackendName = Literal["triton", "native", "torch"]

_MODULES: dict[str, str] = {
    "triton": "kernels.triton.attention",
    "native": "kernels.native",
    "torch": "kernels.reference",
}
_TRITON_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which query tokens attend to which blocks. Decode and chunked prefill mix freely in one batch.

    The queries of all sequences lie one after another. Query i of sequence s sits at position
    `kv_lens[s] - query_len(s) + i` and sees the KV of positions up to and including its own, which must
    already be written: `kv_lens` counts this step's tokens too.

    block_tables:  int32 [seqs, max_blocks]  rows are padded with any valid index; padding is never read
    query_starts:  int32 [seqs + 1]          prefix sums of the query lengths; query_starts[-1] == tokens
    kv_lens:       int32 [seqs]              KV tokens of each sequence, this step's included; at least 1
    slots:         int64 [tokens]            where each token's KV is written: block * block_size + offset
    max_query_len: longest query of the batch (1: a pure decode step)
    max_kv_len:    longest context of the batch
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    max_query_len: int
    max_kv_len: int


class Backend(Protocol):
    """What a back end module offers. Arguments are already validated; `out` and `kv` are written in place."""

    def paged_attention(
        self, query: torch.Tensor, kv: torch.Tensor, batch: PagedBatch, scale: float, out: torch.Tensor
    ) -> object: ...

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor
    ) -> object: ...


def paged_attention(
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Causal attention of every query token over its own sequence's blocks; sums are at least float32.

    query: [tokens, q_heads, head_dim]; head h reads KV head `h // (q_heads // kv_heads)`
    kv:    [blocks, 2, block_size, kv_heads, head_dim], one layer's slice of the pool; keys at 0, values at 1
    batch: the sequences; not validated here (see `check_batch`)
    scale: factor on the scores, usually head_dim ** -0.5
    out:   [tokens, q_heads, head_dim], written and returned; allocated when None
    backend: None picks the best for the device and dtype

    Of a block only the slots of tokens below `kv_lens` count; whatever else lies there, NaN included, has no
    effect.

    Raises ValueError naming the argument when shapes, dtypes or the back end don't fit.
    """
    _check_kv(kv)
    if query.dim() != 3 or query.stride(2) != 1:
        raise ValueError(
            f"query must be [tokens, q_heads, head_dim], last dimension dense, got {_say(query)}"
        )
    if query.dtype != kv.dtype or query.size(2) != kv.size(4) or query.size(1) % kv.size(3):
        raise ValueError(
            f"query must have the dtype and head_dim of kv, {_say(kv)}, and a multiple of its heads, "
            f"got {_say(query)}"
        )
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    elif out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1:
        raise ValueError(f"out must be like query, {_say(query)}, last dimension dense, got {_say(out)}")
    _backend(backend, query).paged_attention(query, kv, batch, scale, out)
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: BackendName | None = None,
) -> None:
    """Put each token's key and value into its slot of one layer's blocks.

    key, value: [tokens, kv_heads, head_dim]
    kv:         [blocks, 2, block_size, kv_heads, head_dim], one layer's slice of the pool
    slots:      int64 [tokens], block * block_size + offset; all different and in the pool (unchecked)

    Raises ValueError naming the argument when shapes, dtypes or the back end don't fit.
    """
    _check_kv(kv)
    if key.dim() != 3 or key.shape[1:] != kv.shape[3:] or key.dtype != kv.dtype or key.stride(2) != 1:
        raise ValueError(
            "key must be [tokens, kv_heads, head_dim], last dimension dense, and fit kv, "
            f"{_say(kv)}, got {_say(key)}"
        )
    if value.shape != key.shape or value.dtype != key.dtype or value.stride(2) != 1:
        raise ValueError(f"value must be like key, {_say(key)}, last dimension dense, got {_say(value)}")
    if slots.dtype != torch.int64 or slots.dim() != 1 or slots.size(0) != key.size(0):
        raise ValueError(f"slots must be int64 [{key.size(0)}], one for each token, got {_say(slots)}")
    _backend(backend, key).write_kv(key, value, kv, slots)


@lru_cache(maxsize=64)
def pick_backend(device: torch.device | str, dtype: torch.dtype, head_dim: int = 64) -> BackendName:
    """The back end that `backend=None` means: Triton on a GPU, native on a CPU, torch where neither can run.

    The answer holds for the life of the process. The first call for a CPU may compile the native library.
    """
    kind = torch.device(device).type
    if kind == "cuda" and dtype in _TRITON_DTYPES and importlib.util.find_spec("triton") is not None:
        return "triton"
    if kind == "cpu":
        native = importlib.import_module(_MODULES["native"])
        if native.available() and native.supports(dtype, head_dim):
            return "native"
    return "torch"


def _backend(name: BackendName | None, tensor: torch.Tensor) -> Backend:
    if name is None:
        name = pick_backend(tensor.device, tensor.dtype, tensor.size(2))
    elif name == "native":
        _require_native(tensor.dtype, tensor.size(2))
    return _load(name)


@lru_cache(maxsize=8)
def _load(name: str) -> Backend:
    if name not in _MODULES:
        raise ValueError(f"backend must be one of {', '.join(_MODULES)} or None, got {name!r}")
    return cast(Backend, importlib.import_module(_MODULES[name]))


def _require_native(dtype: torch.dtype, head_dim: int) -> None:
    native = importlib.import_module(_MODULES["native"])
    if not native.available():
        raise ValueError("backend 'native' is not available on this machine")
    if not native.supports(dtype, head_dim):
        raise ValueError(f"backend 'native' does not support {dtype} with head_dim {head_dim}")


def _check_kv(kv: torch.Tensor) -> None:
    if kv.dim() != 5 or kv.size(1) != 2 or kv.stride(4) != 1:
        raise ValueError(
            "kv must be one layer's [blocks, 2, block_size, kv_heads, head_dim], last dimension dense, "
            f"got {_say(kv)}"
        )


def _say(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
