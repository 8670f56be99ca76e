"""What one forward step of a model costs, by batch and context, beside what its memory reads alone would.

    python -m bench.step

A step reads every weight and the KV of every context once; `floor` is that over the speed of a plain read.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Annotated, Any

# As the engine process has it (see engine.process); torch reads it once.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import typer

from bench.kernels_cpu import read_bandwidth
from cache.layout import KVLayout
from engine.model.loader import LoadedModel, load_model, open_original
from engine.model.source import resolve_model
from kernels.attention import PagedBatch

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of `sequences`, each with `new` tokens that end a context of `context` tokens."""

    sequences: int
    context: int
    new: int = 1


CASES = [
    Case(1, 128),
    Case(1, 4000),
    Case(8, 400),
    Case(32, 500),
    Case(1, 450, new=24),
    Case(1, 4050, new=24),
]


def inputs(case: Case, num_blocks: int) -> dict[str, Any]:
    """The step's tensors, with the blocks of each context scattered over the pool."""
    blocks = -(-case.context // BLOCK_SIZE)
    tables = (
        torch.randperm(num_blocks)[: blocks * case.sequences].view(case.sequences, blocks).to(torch.int32)
    )
    positions = torch.arange(case.context - case.new, case.context).repeat(case.sequences)
    owner = torch.arange(case.sequences).repeat_interleave(case.new)
    tokens = case.sequences * case.new
    batch = PagedBatch(
        block_tables=tables,
        query_starts=torch.arange(0, tokens + 1, case.new, dtype=torch.int32),
        kv_lens=torch.full((case.sequences,), case.context, dtype=torch.int32),
        slots=tables[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        max_query_len=case.new,
        max_kv_len=case.context,
    )
    token_ids = torch.randint(0, 1000, (tokens,))
    last = torch.arange(case.new - 1, tokens, case.new)
    return {"token_ids": token_ids, "positions": positions, "batch": batch, "last": last}


def seconds(model: LoadedModel, pool: torch.Tensor, case: Case, repeats: int) -> float:
    """The median of `repeats` steps, after a few that warm up."""
    step = inputs(case, pool.size(0))
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 3):
            started = time.perf_counter()
            model.forward(step["token_ids"], step["positions"], step["batch"], pool, step["last"])
            times.append(time.perf_counter() - started)
    return sorted(times[3:])[repeats // 2]


def weight_bytes(model: torch.nn.Module) -> int:
    """What a step reads of the weights; a head tied to the embedding counts once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def main(
    model: Annotated[str | None, typer.Option(help="Hub id, folder or .gguf file")] = None,
    repeats: int = 40,
) -> None:
    source = resolve_model(model)
    loaded = load_model(source)
    spec = loaded.spec
    weights = weight_bytes(open_original(source))
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.dtype)
    most = max(case.sequences * -(-case.context // BLOCK_SIZE) for case in CASES)
    pool = layout.allocate(2 * most)
    bandwidth = read_bandwidth(1.0)
    print(f"{spec.name}, {torch.get_num_threads()} threads; memory reads at {bandwidth / 1e9:.1f} GB/s")
    for case in CASES:
        step = seconds(loaded, pool, case, repeats)
        floor = (weights + case.sequences * case.context * layout.token_bytes) / bandwidth
        print(
            f"{case.sequences:3d} sequences x {case.new:2d} new tokens over {case.context:5d}: "
            f"{step * 1e3:6.2f} ms, floor {floor * 1e3:5.2f} ms ({step / floor:.1f} times)"
        )


if __name__ == "__main__":
    typer.run(main)
