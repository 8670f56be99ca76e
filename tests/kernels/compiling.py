"""Calls for the compiling process."""

import dataclasses
from typing import Any

import torch

from kernels.compile import Compiled, compile_launch, sample_launches


def compile_samples(
    target: str, dtype: torch.dtype, head_dim: int, *, only: tuple[str, ...] | None = None, **shape: Any
) -> dict[str, list[Compiled]]:
    launches = sample_launches(dtype, head_dim, **shape)
    chosen = only or tuple(launches)
    return {name: [compile_launch(launch, target) for launch in launches[name]] for name in chosen}


def compile_greedy_kernel(target: str) -> Compiled:
    """A prefill with far too many rows for its threads."""
    (launch,) = sample_launches(torch.bfloat16, 128)["prefill"]
    sizes = {"ROWS": 256, "TOKENS": 64, "TILE": 64}
    greedy = dataclasses.replace(launch, arguments=launch.arguments | sizes, num_warps=4)
    return compile_launch(greedy, target)
