"""A kernel and all that one launch of it takes, as data: to run on a GPU or to compile without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """arguments: every parameter of the kernel by name, constexpr ones included.

    Tensors may lie on torch's `meta` device when the launch is only compiled. `run` launches on the current
    device and stream.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def options(self, *, amd: bool) -> dict[str, Any]:
        """Triton's compile options. AMD's pipeline keeps one stage less: its shared memory is 64 KiB."""
        stages = min(self.num_stages, 2) if amd else self.num_stages
        return {"num_warps": self.num_warps, "num_stages": stages, "enable_fp_fusion": True}

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options(amd=torch.version.hip is not None))
