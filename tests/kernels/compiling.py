"""Calls for the compiling process."""

import dataclasses
import itertools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.compile import TARGETS, Compiled, compile_launch, sample_launches, source_of


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


class _PretendedGpu:
    """As much of a driver as Triton's launcher needs up to the point of launching."""

    def get_current_target(self) -> GPUTarget:
        return TARGETS["sm_90"]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def differences_from_launcher(dtype: torch.dtype, head_dim: int, **shape: Any) -> list[str]:
    """Where the source we compile differs from what Triton's own launcher makes of the same arguments."""
    found = []
    driver.set_active(_PretendedGpu())  # for good: this process never launches anything
    for launch in itertools.chain(*sample_launches(dtype, head_dim, **shape).values()):
        arguments = {
            name: torch.empty(0, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in launch.arguments.items()
        }
        options = launch.options(amd=False)
        theirs = launch.kernel.warmup(grid=launch.grid, **arguments, **options).src
        ours = source_of(launch)
        for part in ("signature", "constants"):
            if getattr(ours, part) != getattr(theirs, part):
                found.append(f"{ours.name}: {part}")
        if ours.attrs != {where: value for where, value in theirs.attrs.items() if value}:
            found.append(f"{ours.name}: attrs")
    return found
