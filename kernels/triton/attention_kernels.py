"""The device code of paged attention: decode, which can split the context, its reduce step, and prefill.

All of them pack the query heads that share a KV head, and in prefill several query tokens, into the rows of
one matrix product, so each key and value is read once for all of them. Contexts are walked in tiles whose
size has nothing to do with the block size: every lane of a tile looks up its own block. Softmax runs online
(Milakov and Gimelshein, 2018) in float32 and base 2. Offsets that grow with the pool are 64 bit.
"""

# Device code: Triton's decorator and its values have no types that mypy could check.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def _walk(
    query,  # [ROWS, PADDED_DIM]
    positions,  # [ROWS] last position each row may look at
    weighted,  # [ROWS, PADDED_DIM] float32, running sum of values
    peak,  # [ROWS] highest score so far, base 2
    total,  # [ROWS] running sum of weights
    first,
    last,  # context positions [first, last)
    kv_ptr,  # this KV head of block 0
    table_ptr,
    kv_block,
    kv_half,
    kv_slot,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # False: whole tiles that every row may see
):
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    real = dims < HEAD_DIM
    # Blocks are looked up one tile ahead: the loads of keys and values then depend on no other load of their
    # own step, and the compiler can start them early.
    block = tl.load(table_ptr + (first + lanes) // BLOCK_SIZE, mask=first + lanes < last, other=0)
    # The masked end of a walk is a step or two: nothing to overlap, so no registers are spent on trying.
    stages: tl.constexpr = 1 if MASKED else None
    for start in tl.range(first, last, TILE, num_stages=stages):
        spots = start + lanes
        inside = spots < last
        offsets = block.to(tl.int64) * kv_block + (spots % BLOCK_SIZE).to(tl.int64) * kv_slot
        key_ptrs = kv_ptr + offsets[None, :] + dims[:, None]
        value_ptrs = kv_ptr + kv_half + offsets[:, None] + dims[None, :]
        following = spots + TILE
        block = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < last, other=0)
        # What lies outside is loaded as zero: weight 0 times a stray NaN would still be NaN.
        if MASKED:
            key = tl.load(key_ptrs, mask=real[:, None] & inside[None, :], other=0.0)
            value = tl.load(value_ptrs, mask=inside[:, None] & real[None, :], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            key = tl.load(key_ptrs)
            value = tl.load(value_ptrs)
        else:
            key = tl.load(key_ptrs, mask=real[:, None], other=0.0)
            value = tl.load(value_ptrs, mask=real[None, :], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2  # [ROWS, TILE]
        if MASKED:
            visible = inside[None, :] & (spots[None, :] <= positions[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        # Finite from the first tile on: every row sees at least the first position of its walk.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        rescale = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * rescale + tl.sum(weights, 1)
        weighted = weighted * rescale[:, None]
        weighted += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = new_peak
    return weighted, peak, total


@triton.jit
def decode_kernel(
    out_ptr,  # [seqs, q_heads, head_dim], or [seqs, q_heads, SPLITS, head_dim] float32 when split
    lse_ptr,  # [seqs, q_heads, SPLITS] float32: log2 of each split's sum of weights; unused when not split
    query_ptr,
    kv_ptr,
    tables_ptr,
    kv_lens_ptr,
    scale_log2,
    out_token,
    out_head,
    query_token,
    query_head,
    kv_block,
    kv_half,
    kv_slot,
    kv_head,
    tables_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Every sequence has one query token. Grid (kv_heads, SPLITS, seqs): heads first, they are neighbours."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens_ptr + seq)

    # Splits are whole tiles. Short contexts leave the last splits empty.
    tiles = tl.cdiv(kv_len, TILE)
    share = tl.cdiv(tiles, SPLITS) * TILE
    first = split * share
    last = tl.minimum(first + share, kv_len)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    heads = head * GROUP + rows
    wanted = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    if SPLITS > 1 and first >= last:
        lse_ptrs = lse_ptr + (seq * HEADS + heads) * SPLITS + split
        tl.store(lse_ptrs, tl.full([ROWS], float("-inf"), tl.float32), mask=rows < GROUP)
        return

    query_ptrs = query_ptr + seq * query_token + heads[:, None] * query_head + dims[None, :]
    query = tl.load(query_ptrs, mask=wanted, other=0.0)
    positions = tl.full([ROWS], 0, tl.int32) + (kv_len - 1)
    weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    head_ptr = kv_ptr + head.to(tl.int64) * kv_head
    table_ptr = tables_ptr + seq * tables_row
    whole = first + (last - first) // TILE * TILE
    weighted, peak, total = _walk(
        query, positions, weighted, peak, total, first, whole, head_ptr, table_ptr,
        kv_block, kv_half, kv_slot, scale_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, MASKED=False,
    )  # fmt: skip
    weighted, peak, total = _walk(
        query, positions, weighted, peak, total, whole, last, head_ptr, table_ptr,
        kv_block, kv_half, kv_slot, scale_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, MASKED=True,
    )  # fmt: skip
    result = weighted / total[:, None]
    out_ptrs = out_ptr + seq * out_token + heads[:, None] * out_head + dims[None, :]
    if SPLITS > 1:
        lse_ptrs = lse_ptr + (seq * HEADS + heads) * SPLITS + split
        tl.store(lse_ptrs, peak + tl.log2(total), mask=rows < GROUP)
        out_ptrs += split * HEAD_DIM
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def reduce_kernel(
    out_ptr,  # [seqs, q_heads, head_dim]
    partial_ptr,  # [seqs, q_heads, SPLITS, head_dim] float32
    lse_ptr,  # [seqs, q_heads, SPLITS] float32
    out_token,
    out_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits of one token and head by their shares of the softmax. Grid (q_heads, seqs)."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    row = seq * HEADS + head
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    lse = tl.load(lse_ptr + row * SPLITS + splits)
    weights = tl.exp2(lse - tl.max(lse, 0))
    weights = weights / tl.sum(weights, 0)
    # An empty split wrote no result: its place may hold anything.
    filled = (lse > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    partial_ptrs = partial_ptr + (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(partial_ptrs, mask=filled, other=0.0)
    result = tl.sum(partial * weights[:, None], 0)
    out_ptrs = out_ptr + seq * out_token + head * out_head + dims
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _find_sequence(program, starts_ptr, seqs, TOKENS: tl.constexpr):
    """The sequence that query block `program` belongs to.

    Sequence s begins at query block `starts[s] // TOKENS + s`. That leaves each at least as many blocks as it
    needs, whatever the lengths are, so the grid is known without reading lengths back to the host.
    """
    low = 0
    high = seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // TOKENS + middle <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def prefill_kernel(
    out_ptr,  # [tokens, q_heads, head_dim]
    query_ptr,
    kv_ptr,
    tables_ptr,
    starts_ptr,
    kv_lens_ptr,
    seqs,
    scale_log2,
    out_token,
    out_head,
    query_token,
    query_head,
    kv_block,
    kv_half,
    kv_slot,
    kv_head,
    tables_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of one program: ROWS // GROUP
    TILE: tl.constexpr,
):
    """Any mix of query lengths. Grid (tokens // TOKENS + seqs, kv_heads).

    Row r of a program is its token r // GROUP and head r % GROUP.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    seq = _find_sequence(program, starts_ptr, seqs, TOKENS)
    begin = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - begin
    skipped = (program - begin // TOKENS - seq) * TOKENS
    if skipped >= query_len:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    context = kv_len - query_len  # tokens before the first query token

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    tokens = skipped + rows // GROUP
    heads = head * GROUP + rows % GROUP
    real = (rows < TOKENS * GROUP) & (tokens < query_len)
    wanted = real[:, None] & (dims < HEAD_DIM)[None, :]
    token = (begin + tokens).to(tl.int64)
    query_ptrs = query_ptr + token[:, None] * query_token + heads[:, None] * query_head + dims[None, :]
    query = tl.load(query_ptrs, mask=wanted, other=0.0)
    positions = context + tokens
    weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    head_ptr = kv_ptr + head.to(tl.int64) * kv_head
    table_ptr = tables_ptr + tl.cast(seq, tl.int64) * tables_row

    # Whole tiles that even the first token sees need no mask; the rest is the causal edge.
    whole = (context + skipped + 1) // TILE * TILE
    last = tl.minimum(context + skipped + TOKENS, kv_len)
    weighted, peak, total = _walk(
        query, positions, weighted, peak, total, 0, whole, head_ptr, table_ptr,
        kv_block, kv_half, kv_slot, scale_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, MASKED=False,
    )  # fmt: skip
    weighted, peak, total = _walk(
        query, positions, weighted, peak, total, whole, last, head_ptr, table_ptr,
        kv_block, kv_half, kv_slot, scale_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, MASKED=True,
    )  # fmt: skip
    result = weighted / total[:, None]
    out_ptrs = out_ptr + token[:, None] * out_token + heads[:, None] * out_head + dims[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=wanted)
