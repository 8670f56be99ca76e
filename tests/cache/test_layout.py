from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cache.layout import KVLayout


def layout(**change: object) -> KVLayout:
    fields: dict[str, object] = {"num_layers": 4, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.bfloat16}
    return KVLayout(**{**fields, **change})  # type: ignore[arg-type]


def test_sizes_in_bytes_follow_the_shape() -> None:
    assert layout().token_bytes == 4 * 2 * 3 * 64 * 2
    assert layout().block_bytes == 16 * layout().token_bytes
    memory = layout().allocate(5)
    assert memory.shape == (5, 4, 2, 16, 3, 64) == layout().shape(5)
    assert memory.numel() * memory.itemsize == 5 * layout().block_bytes
    assert memory.dtype is torch.bfloat16


def test_a_block_is_contiguous_over_all_layers() -> None:
    assert layout().allocate(2)[1].is_contiguous()


def test_fresh_memory_holds_no_nan() -> None:
    assert not layout().allocate(3).any()


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_block_sizes_are_powers_of_two(block_size: int) -> None:
    assert layout(block_size=block_size).shape(1)[3] == block_size


@pytest.mark.parametrize("block_size", [-16, 0, 1, 4, 12, 17, 256])
def test_other_block_sizes_are_refused_by_name(block_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"block_size must be a power of two from 8 to 128, got {block_size}"
    ):
        layout(block_size=block_size)


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_empty_dimensions_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        layout(**{field: 0})


def test_other_bad_values_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype must be a floating point type"):
        layout(dtype=torch.int8)
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        layout().allocate(0)


def test_the_bookkeeping_does_not_import_torch() -> None:
    code = "import sys, cache.manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
