"""Numbers at the head of a GGUF file that transformers does not hand on, read without unpacking the rest.

The layout is that of versions 2 and 3 of the format: a count of key-value pairs, then the pairs.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_SIZES = {**{code: struct.calcsize(form) for code, form in _INTEGERS.items()}, 6: 4, 7: 1, 12: 8}
_STRING, _ARRAY = 8, 9


def end_token_ids(path: Path) -> list[int]:
    """Ids that end a text, a turn or a message by the file's own word, the end of a text first.

    Raises `ValueError` if this is no GGUF file.
    """
    found: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            magic, version, _, pairs = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"{path} is not a GGUF file of version 2 or 3")
            for _ in range(pairs):
                key = file.read(_number(file, "<Q")).decode()
                value = _read(file, _number(file, "<I"))
                if key in _END_KEYS and value is not None:
                    found[key] = value
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{path} ends early or is damaged: {error}") from error
    return [found[key] for key in _END_KEYS if key in found]


def _read(file: BinaryIO, code: int) -> int | None:
    """An integer's value; anything else is only passed over."""
    if code in _INTEGERS:
        return _number(file, _INTEGERS[code])
    if code == _STRING:
        file.seek(_number(file, "<Q"), 1)
    elif code == _ARRAY:
        of, count = _number(file, "<I"), _number(file, "<Q")
        if of in _SIZES:
            file.seek(_SIZES[of] * count, 1)
        else:
            for _ in range(count):
                _read(file, of)
    elif code in _SIZES:
        file.seek(_SIZES[code], 1)
    else:
        raise ValueError(f"unknown type {code} in a GGUF file")
    return None


def _number(file: BinaryIO, form: str) -> int:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return int(value)
