"""Paged KV memory in one page: append tokens, read them back, fork, free.

From the root of the repository: `python -m examples.paged_kv_cache`.
"""

from __future__ import annotations

import torch

from cache.layout import KVLayout
from cache.paged import PagedKVCache


def main() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16)
    cache = PagedKVCache(layout, num_blocks=100)
    print(f"{cache.free_blocks} blocks of {layout.block_size} tokens, {layout.block_bytes:,} bytes each")

    # A model computes one key and one value per layer and head for each token. Here they are random.
    keys = torch.randn(layout.num_layers, 40, layout.num_kv_heads, layout.head_dim)
    values = torch.randn_like(keys)
    sequence = cache.allocate()
    for token in range(40):
        cache.append(sequence, keys[:, token], values[:, token])
    print(f"{sequence.kv_len} tokens appended: they lie in blocks {sequence.block_ids}")
    assert len(sequence.block_ids) == 3
    assert cache.free_blocks == 97

    back = cache.gather(sequence)
    assert torch.equal(back.keys, keys)
    assert torch.equal(back.values, values)
    print("gathered: they come back as written")

    # A fork shares all blocks. Whoever writes into a shared block first gets a copy of that one block.
    fork = cache.fork(sequence)
    assert cache.free_blocks == 97
    cache.append(fork, keys[:, 0], values[:, 0])
    print(f"forked and appended: the fork lies in blocks {fork.block_ids}")
    assert cache.free_blocks == 96
    assert torch.equal(cache.gather(sequence).keys, keys)

    cache.free(fork)
    cache.free(sequence)
    print(f"freed: {cache.free_blocks} blocks are free again")
    assert cache.free_blocks == 100


if __name__ == "__main__":
    main()
