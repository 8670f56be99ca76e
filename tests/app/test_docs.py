"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.models import ResponseCreate

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text("utf-8")

NOT_ON_THE_WIRE = {"duplicate_request", "method_not_allowed", "not_found", "server_error", "invalid_request"}


def codes() -> set[str]:
    """Every error code written in the rooms that speak to clients."""
    found: set[str] = set()
    for room in ("app", "sessions"):
        for path in (ROOT / room).rglob("*.py"):
            found |= set(re.findall(r'code="([a-z_]+)"', path.read_text("utf-8")))
    return found - NOT_ON_THE_WIRE


@pytest.mark.parametrize("code", sorted(codes()))
def test_every_error_code_is_documented(code: str) -> None:
    assert f"`{code}`" in PROTOCOL


@pytest.mark.parametrize("name", sorted(ResponseCreate.model_fields))
def test_every_field_of_a_turn_is_documented(name: str) -> None:
    assert re.search(rf"`{name}[`.:]", PROTOCOL)
