"""Ahead-of-time compilation of the Triton kernels, on a machine without a GPU, and what the binaries need.

The launches that are compiled are the very ones the GPU would get: `plan_*` with tensors on torch's `meta`
device. Registers and spills come out of the binary: NVIDIA's `cuobjdump` and AMD's own assembly notes, both
in the Triton package.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.attention import PagedBatch
from kernels.triton.attention import plan_attention, plan_write_kv
from kernels.triton.data import plan_move
from kernels.triton.launch import Launch

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel needs on one target.

    registers: of one thread
    spilled:   what a thread keeps in memory for want of registers: bytes on NVIDIA, registers on AMD
    shared:    bytes of shared memory of one program
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int


def compile_launch(launch: Launch, target: str) -> Compiled:
    """Compile one launch for one of `TARGETS`. Raises what Triton raises when the kernel does not compile."""
    options = launch.options(amd=TARGETS[target].backend == "hip")
    binary = triton.compile(source_of(launch), target=TARGETS[target], options=options)
    usage = _amd_usage(binary.asm["amdgcn"]) if "amdgcn" in binary.asm else _nvidia_usage(binary.asm["cubin"])
    return Compiled(launch.kernel.__name__, target, *usage, shared=binary.metadata.shared)


def sample_launches(
    dtype: torch.dtype, head_dim: int, *, q_heads: int = 32, kv_heads: int = 8, block_size: int = 16
) -> dict[str, list[Launch]]:
    """The launches of typical calls for a model of these sizes, by what they do."""
    blocks, layers, seqs = 4096, 32, 4

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def attention(tokens: int, max_query_len: int, splits: int) -> list[Launch]:
        batch = PagedBatch(
            block_tables=tensor(seqs, 256, dtype=torch.int32),
            query_starts=tensor(seqs + 1, dtype=torch.int32),
            kv_lens=tensor(seqs, dtype=torch.int32),
            slots=tensor(tokens, dtype=torch.int64),
            max_query_len=max_query_len,
            max_kv_len=4096,
        )
        query = tensor(tokens, q_heads, head_dim)
        return plan_attention(
            query, pool[:, 0], batch, head_dim**-0.5, torch.empty_like(query), splits=splits
        )

    pool = tensor(blocks, layers, 2, block_size, kv_heads, head_dim)
    key, ids = tensor(64, kv_heads, head_dim), tensor(64, dtype=torch.int64)
    stack = tensor(64, *pool.shape[1:])
    return {
        "decode": attention(seqs, 1, 1),
        "split decode": attention(seqs, 1, 16),
        "prefill": attention(2048, 2045, 1),
        "write": [plan_write_kv(key, key, pool[:, 0], ids)],
        "copy": [plan_move(pool, pool, 64, ids, ids)],
        "gather": [plan_move(pool, stack, 64, source_ids=ids)],
        "scatter": [plan_move(stack, pool, 64, target_ids=ids)],
    }


def source_of(launch: Launch) -> ASTSource:
    """The kernel specialised for its arguments exactly as Triton's own launcher would do it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = False
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPE_NAMES[value.dtype]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Triton's kernels have no arrays and no calls: a stack frame is there for spilled registers only.
    registers, stack, local = (_number(rf"\b{name}:(\d+)", report) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def _amd_usage(assembly: str) -> tuple[int, int]:
    notes = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    registers, vector, scalar = (_number(rf"\.{name}:\s*(\d+)", assembly) for name in notes)
    return registers, vector + scalar


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise RuntimeError(f"no {pattern} in the compiler's report:\n{report[-2000:]}")
    return int(found[1])


def main() -> None:
    """Print a table for every target: `python -m kernels.compile`."""
    for target in TARGETS:
        for head_dim in (64, 128):
            for name, launches in sample_launches(torch.bfloat16, head_dim).items():
                for launch in launches:
                    done = compile_launch(launch, target)
                    print(
                        f"{target:7} bf16 head_dim {head_dim:3} {name:13} {done.kernel:19} "
                        f"{done.registers:4} registers {done.spilled:4} spilled {done.shared:6} B shared"
                    )


if __name__ == "__main__":
    main()
