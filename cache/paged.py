"""Paged KV memory by itself: sequences whose keys and values grow in blocks.

For learning, and for embedding where no prefix is ever searched. It stands on the same pool, tables and
layout as the whole cache, with nothing between a sequence and its blocks:

    cache = PagedKVCache(KVLayout(num_layers=2, num_kv_heads=3, head_dim=64), num_blocks=100)
    sequence = cache.allocate()
    cache.append(sequence, keys, values)
    keys, values = cache.gather(sequence)
    cache.free(sequence)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cache.errors import OutOfBlocks
from cache.layout import KVLayout
from cache.pool import BlockPool
from cache.table import BlockTable


class KV(NamedTuple):
    """Keys and values of a sequence, each `[layers, tokens, kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


class PagedKVCache:
    """The memory of `num_blocks` blocks, and who has which. `memory` is what the kernels work on."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.memory = layout.allocate(num_blocks, device)
        self._pool = BlockPool(num_blocks)
        self._sequences: set[BlockTable] = set()

    @property
    def free_blocks(self) -> int:
        return self._pool.free

    def allocate(self) -> BlockTable:
        """An empty sequence. It takes blocks as it grows."""
        sequence = BlockTable(self.layout.block_size)
        self._sequences.add(sequence)
        return sequence

    def append(self, sequence: BlockTable, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens at the end.

        keys, values: `[layers, tokens, kv_heads, head_dim]`, or `[layers, kv_heads, head_dim]` for one token.
        Raises `ValueError` for another shape, and `OutOfBlocks`, with nothing changed, if there is no room.
        """
        self._check_known(sequence)
        keys, values = self._by_token("keys", keys), self._by_token("values", values)
        if len(keys) != len(values):
            raise ValueError(f"values must be as many tokens as keys, {len(keys)}, got {len(values)}")
        self._make_room(sequence, len(keys))
        positions = torch.arange(sequence.kv_len, sequence.kv_len + len(keys))
        blocks, offsets = self._slots(sequence, positions)
        self.memory[blocks, :, 0, offsets] = keys
        self.memory[blocks, :, 1, offsets] = values
        sequence.kv_len += len(keys)

    def gather(self, sequence: BlockTable) -> KV:
        """All its keys and values as contiguous tensors."""
        self._check_known(sequence)
        blocks, offsets = self._slots(sequence, torch.arange(sequence.kv_len))
        keys, values = self.memory[blocks, :, 0, offsets], self.memory[blocks, :, 1, offsets]
        return KV(keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous())

    def fork(self, sequence: BlockTable) -> BlockTable:
        """A second sequence that goes on from here. It shares every block until one of the two writes."""
        self._check_known(sequence)
        twin = self.allocate()
        twin.block_ids = list(sequence.block_ids)
        twin.kv_len = sequence.kv_len
        for block in twin.block_ids:
            self._pool.share(block)
        return twin

    def free(self, sequence: BlockTable) -> None:
        """Give back what nobody else shares. Raises `ValueError` for a sequence that is freed already."""
        self._check_known(sequence)
        self._sequences.remove(sequence)
        for block in sequence.block_ids:
            self._pool.give_back(block)
        sequence.block_ids, sequence.kv_len = [], 0

    def _make_room(self, sequence: BlockTable, tokens: int) -> None:
        """Blocks for that many more tokens; a last block that is shared and not full is copied first."""
        tail = sequence.block_ids[-1] if tokens and sequence.room else None
        copy = tail is not None and self._pool.refs(tail) > 1
        missing = sequence.missing_blocks(tokens)
        if missing + copy > self._pool.free:
            raise OutOfBlocks(f"{missing + copy} more blocks are needed, {self._pool.free} are free")
        if tail is not None and copy:
            sequence.block_ids[-1] = self._pool.take()
            self.memory[sequence.block_ids[-1]] = self.memory[tail]
            self._pool.give_back(tail)
        sequence.block_ids += [self._pool.take() for _ in range(missing)]

    def _slots(self, sequence: BlockTable, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each position, int64 `[tokens]`."""
        blocks = torch.tensor(sequence.block_ids, dtype=torch.int64)
        return blocks[positions // sequence.block_size], positions % sequence.block_size

    def _by_token(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`[tokens, layers, kv_heads, head_dim]`."""
        layout = self.layout
        by_layer = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor
        rest = (layout.num_layers, layout.num_kv_heads, layout.head_dim)
        if by_layer.dim() != 4 or (by_layer.shape[0], *by_layer.shape[2:]) != rest:
            expected = f"[{rest[0]}, tokens, {rest[1]}, {rest[2]}]"
            raise ValueError(
                f"{name} must be {expected} (or one token without that axis), got {list(tensor.shape)}"
            )
        return by_layer.transpose(0, 1)

    def _check_known(self, sequence: BlockTable) -> None:
        if sequence not in self._sequences:
            raise ValueError("sequence must be one that this cache allocated and has not freed")
