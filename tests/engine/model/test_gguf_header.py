"""End ids straight from a GGUF file's head."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from engine.model.gguf_header import end_token_ids


def write(path: Path, **ids: int) -> Path:
    """A file with every type of value before and between the ids."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a name")
    writer.add_bool("some.flag", True)
    writer.add_float32("some.float", 0.5)
    writer.add_float64("some.double", 0.5)
    writer.add_uint8("some.byte", 7)
    writer.add_int64("some.long", -7)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.nested", [[1, 2], [3]])
    writer.add_token_list([f"token {number}" for number in range(100)])
    for key, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    writer.add_array("more.strings", ["x", "yy", ""])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({}, []),
        ({"eos": 5}, [5]),
        ({"bos": 1, "eot": 9, "eos": 5, "unknown": 3}, [5, 9]),
        ({"eom": 8, "eot": 9}, [9, 8]),
    ],
)
def test_ids_are_found_among_everything_else(
    ids: dict[str, int], expected: list[int], tmp_path: Path
) -> None:
    assert end_token_ids(write(tmp_path / "a.gguf", **ids)) == expected


def test_the_default_model_ends_with_im_end(default_model_path: Path) -> None:
    assert end_token_ids(default_model_path) == [2]


@pytest.mark.parametrize("data", [b"", b"GGUF", b"what is this, then, and why is it here?"])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ValueError):
        end_token_ids(tmp_path / "a.gguf")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", eos=5)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(ValueError, match="ends early"):
        end_token_ids(path)
