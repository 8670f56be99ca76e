"""The kernels compile for GPUs that are not here, and the hot one keeps everything in registers."""

import itertools

import pytest
import torch

TARGETS = ("sm_80", "sm_90", "gfx942")
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}  # of one program, at most


@pytest.fixture
def compiled(compile_process):
    def compiled(target, *args, **options):
        return compile_process.call("tests.kernels.compiling", "compile_samples", target, *args, **options)

    return compiled


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_kernel_compiles_for_bfloat16(compiled, target, head_dim):
    samples = compiled(target, torch.bfloat16, head_dim)
    names = {kernel.kernel for kernels in samples.values() for kernel in kernels}
    assert names == {
        "decode_kernel",
        "reduce_kernel",
        "prefill_kernel",
        "write_kv_kernel",
        "move_blocks_kernel",
    }
    for use, kernels in samples.items():
        for kernel in kernels:
            assert kernel.spilled == 0, f"{use} spills registers: {kernel}"
            assert kernel.registers > 0, kernel
            assert kernel.shared <= SHARED_MEMORY[target], kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("head_dim", "q_heads", "kv_heads", "block_size"), [(64, 9, 3, 32), (96, 32, 32, 16), (256, 8, 4, 64)]
)
def test_decode_spills_nothing_for_other_shapes(compiled, target, head_dim, q_heads, kv_heads, block_size):
    samples = compiled(
        target,
        torch.float16,
        head_dim,
        only=("decode", "split decode"),
        q_heads=q_heads,
        kv_heads=kv_heads,
        block_size=block_size,
    )
    for kernel in itertools.chain(*samples.values()):
        assert kernel.spilled == 0, kernel


@pytest.mark.parametrize("target", TARGETS)
def test_float32_compiles_too(compiled, target):
    samples = compiled(target, torch.float32, 64, only=("split decode", "prefill"))
    assert all(kernel.shared <= SHARED_MEMORY[target] for kernel in itertools.chain(*samples.values()))


@pytest.mark.parametrize("target", TARGETS)
def test_spills_would_be_seen(compile_process, target):
    kernel = compile_process.call("tests.kernels.compiling", "compile_greedy_kernel", target)
    assert kernel.spilled > 0


@pytest.mark.parametrize(("head_dim", "q_heads", "kv_heads"), [(64, 9, 3), (96, 4, 4)])
def test_what_is_compiled_is_what_a_launch_would_compile(compile_process, head_dim, q_heads, kv_heads):
    differences = compile_process.call(
        "tests.kernels.compiling",
        "differences_from_launcher",
        torch.bfloat16,
        head_dim,
        q_heads=q_heads,
        kv_heads=kv_heads,
    )
    assert differences == []
