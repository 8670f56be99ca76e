"""Matrix products with fixed weights, in the fastest form this machine has."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]"""

_PACKED_FOR_ROWS = 16
"""oneDNN packs for some number of rows and uses the same form for all; this one is good from 1 to 512."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A product with `weight` [out, in] plus `bias` [out].

    On a CPU with bfloat16 products the weight is packed once for them, a third faster at few rows than
    handing oneDNN the plain matrix every time. The plain matrix is not kept then.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_pack():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        product = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: product(x, packed, bias, "none", _NO_SCALARS, "")
    return partial(_plain, weight, bias)


_NO_SCALARS: list[float | None] = []


def _plain(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight, bias)


@lru_cache(maxsize=1)
def can_pack() -> bool:
    """Whether torch has the packed bfloat16 product here: tried, as these operators are not documented."""
    try:
        weight = torch.arange(32 * 48, dtype=torch.bfloat16).view(32, 48) / 2048
        x = torch.ones(2, 48, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(found.float(), x.float() @ weight.float().T, rtol=0.02, atol=0.02)


def native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; emulated it is slower than float32."""
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if getattr(torch.cpu, probe, bool)():
            return True
    return False
