"""`check_batch` accepts what the contract allows and names the field that breaks it."""

import dataclasses

import pytest
import torch

from kernels.check import check_batch
from tests.kernels.cases import make_case

CASE = make_case([(1, 9), (2, 20)], seed=0)
BATCH = CASE.batch


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def changed(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def test_a_sound_batch_passes():
    check_batch(BATCH, CASE.kv)
    check_batch(dataclasses.replace(BATCH, max_kv_len=4096), CASE.kv)


def test_padding_of_tables_is_not_looked_at():
    tables = changed(BATCH.block_tables, (0, 1), 10_000)
    check_batch(dataclasses.replace(BATCH, block_tables=tables), CASE.kv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": BATCH.kv_lens.long()}, "kv_lens must be torch.int32"),
        ({"kv_lens": ints()}, "kv_lens must name at least one sequence"),
        ({"kv_lens": ints(9, 1)}, r"kv_lens\[1\] must count this step's 2 tokens too"),
        ({"query_starts": ints(0, 3)}, "query_starts must have 3 entries"),
        ({"query_starts": ints(1, 2, 3)}, "query_starts must begin at 0"),
        ({"query_starts": ints(0, 0, 3)}, "query_starts must begin at 0 and grow by at least 1"),
        ({"query_starts": ints(0, 1, 4)}, "slots must have one entry for each of 4 tokens"),
        ({"block_tables": BATCH.block_tables[:1]}, "block_tables must have 2 rows"),
        ({"block_tables": BATCH.block_tables[:, :1]}, "block_tables must have 2 columns for sequence 1"),
        ({"block_tables": BATCH.block_tables[0]}, "block_tables must be torch.int32 with 2 dimension"),
        (
            {"block_tables": changed(BATCH.block_tables, (1, 1), -1)},
            r"block_tables\[1\] must hold blocks from 0",
        ),
        ({"block_tables": BATCH.block_tables.to("meta")}, "block_tables must be .* on cpu"),
        ({"slots": BATCH.slots.int()}, "slots must be torch.int64"),
        ({"slots": BATCH.slots + 1}, "slots of sequence 0 must be"),
        ({"max_query_len": 1}, "max_query_len must be 2"),
        ({"max_kv_len": 19}, "max_kv_len must be at least 20"),
    ],
)
def test_a_broken_field_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check_batch(dataclasses.replace(BATCH, **changes), CASE.kv)


def test_two_tokens_in_one_place_are_refused():
    case = make_case([(1, 9), (1, 9)], seed=0)
    tables = case.batch.block_tables.clone()
    tables[1] = tables[0]
    slots = case.batch.slots[[0, 0]]
    batch = dataclasses.replace(case.batch, block_tables=tables, slots=slots)
    with pytest.raises(ValueError, match="slots must all be different"):
        check_batch(batch, case.kv)
