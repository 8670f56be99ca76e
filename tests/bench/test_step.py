"""The steps that are timed are ones that the kernels accept."""

import pytest
import torch

from bench.step import BLOCK_SIZE, CASES, Case, inputs
from kernels.check import check_batch


@pytest.mark.parametrize("case", [*CASES, Case(3, 17, new=17), Case(2, 16)], ids=str)
def test_a_batch_is_sound_and_its_blocks_are_nobody_elses(case: Case) -> None:
    num_blocks = case.sequences * -(-case.context // BLOCK_SIZE) + 3
    step = inputs(case, num_blocks)
    check_batch(step["batch"], torch.empty(num_blocks, 2, BLOCK_SIZE, 1, 8))
    assert step["batch"].block_tables.unique().numel() == step["batch"].block_tables.numel()
    assert step["positions"][step["last"]].tolist() == [case.context - 1] * case.sequences
