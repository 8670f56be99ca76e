"""Token ids as sessions keep them: packed, four bytes each."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def ids(values: Iterable[int] = ()) -> array[int]:
    """Pack token ids."""
    return array("I", values)


def to_bytes(values: array[int]) -> bytes:
    """Little-endian, whatever the machine."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def from_bytes(data: bytes) -> array[int]:
    """The inverse of `to_bytes`."""
    values = array("I")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
