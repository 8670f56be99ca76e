"""The device code that moves KV: fresh tokens into their slots, and whole blocks."""

# Device code: Triton's decorator and its values have no types that mypy could check.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    key_ptr,  # [tokens, kv_heads, head_dim]
    value_ptr,
    kv_ptr,  # [blocks, 2, block_size, kv_heads, head_dim]
    slots_ptr,  # int64 [tokens]
    key_token,
    key_head,
    value_token,
    value_head,
    kv_block,
    kv_half,
    kv_slot,
    kv_head,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEADS * HEAD_DIM rounded up to a power of two
):
    """Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, WIDTH)
    inside = element < HEADS * HEAD_DIM
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    target = kv_ptr + (slot // BLOCK_SIZE) * kv_block + (slot % BLOCK_SIZE) * kv_slot + head * kv_head + dim
    key = tl.load(key_ptr + token * key_token + head * key_head + dim, mask=inside)
    value = tl.load(value_ptr + token * value_token + head * value_head + dim, mask=inside)
    tl.store(target, key, mask=inside)
    tl.store(target + kv_half, value, mask=inside)


@triton.jit
def move_blocks_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,  # int64 [moves]; read only when SOURCE_BY_ID
    target_ids_ptr,  # int64 [moves]; read only when TARGET_BY_ID
    source_block,
    target_block,
    size,  # elements of one block
    SOURCE_BY_ID: tl.constexpr,
    TARGET_BY_ID: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy block i of `moves`, chunk by chunk. Grid (moves, ceil(size / CHUNK))."""
    move = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ids_ptr + move) if SOURCE_BY_ID else move
    target = tl.load(target_ids_ptr + move) if TARGET_BY_ID else move
    element = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = element < size
    data = tl.load(source_ptr + source * source_block + element, mask=inside)
    tl.store(target_ptr + target * target_block + element, data, mask=inside)
