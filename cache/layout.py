"""How keys and values lie in memory.

One block is contiguous over all layers, `[layers, 2, block_size, kv_heads, head_dim]`, so that swapping a
block is one copy of a few hundred KiB and not `2 x layers` small ones. A kernel works on one layer's slice,
`pool[:, layer]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_BLOCK_SIZE = 8
MAX_BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one model's KV blocks.

    block_size is in tokens: a power of two from 8 to 128. Raises `ValueError`, naming the field, for a value
    out of range.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        check_block_size(self.block_size)
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point type, got {self.dtype}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[blocks, layers, 2, block_size, kv_heads, head_dim]`; index 0 of the third axis is keys, 1 is
        values."""
        return (num_blocks, self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    def allocate(self, num_blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Zeroed memory for that many blocks. Zeroed, so that stray reads of padding can never meet a NaN."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        return torch.zeros(self.shape(num_blocks), dtype=self.dtype, device=device)


def check_block_size(block_size: int) -> None:
    """Raise `ValueError` unless it is a power of two from 8 to 128."""
    if not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise ValueError(
            f"block_size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, got {block_size!r}"
        )
