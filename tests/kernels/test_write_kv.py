"""KV write, in every back end that is a module of this room's own: torch and Triton."""

import pytest
import torch

from tests.kernels.cases import make_case

BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(params=["torch", "triton"])
def write(request, triton_process):
    def write(key, value, kv, slots):
        triton_process.call("kernels.attention", "write_kv", key, value, kv, slots, backend=request.param)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(8, 1, 64), (16, 3, 96), (64, 2, 256)])
def test_exactly_the_given_slots_are_written(
    write, triton_device, seed, dtype, block_size, kv_heads, head_dim
):
    case = make_case(
        [(1, block_size), (block_size + 1, 2 * block_size), (1, 1)],
        seed=seed,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=triton_device,
    )
    tokens = case.batch.slots.numel()
    # Keys and values are slices of one fused projection, as the model's.
    fused = torch.randn(tokens, 5 * kv_heads, head_dim, dtype=dtype, device=triton_device)
    key, value = fused[:, 3 * kv_heads : 4 * kv_heads], fused[:, 4 * kv_heads :]
    expected = case.pool.clone()
    for token, slot in enumerate(case.batch.slots.tolist()):
        expected[slot // block_size, 1, 0, slot % block_size] = key[token]
        expected[slot // block_size, 1, 1, slot % block_size] = value[token]
    write(key, value, case.kv, case.batch.slots)
    bits = BITS[dtype.itemsize]  # NaN is equal to nothing, its bits are
    assert torch.equal(case.pool.view(bits), expected.view(bits))


def test_no_tokens_write_nothing(write, triton_device, seed):
    case = make_case([(1, 5)], seed=seed, device=triton_device)
    before = case.pool.clone()
    nothing = torch.empty(0, 2, 64, device=triton_device)
    write(nothing, nothing, case.kv, case.batch.slots[:0])
    assert torch.equal(case.pool.view(torch.int32), before.view(torch.int32))
