"""Asking sessions, and reading what the engine was asked in turn."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import GenerateRequest
from sessions.api import SessionError
from tests.sessions.support import ScriptedEngine, ids_of, toy_tokenizer

CLOSING = ids_of("\n")  # what the template puts between the token that ends an answer and the next turn


async def refused(awaitable: Any) -> SessionError:
    with pytest.raises(SessionError) as caught:
        await awaitable
    return caught.value


def new_part(engine: ScriptedEngine) -> list[int]:
    """What the last prompt has beyond the one before it."""
    before, last = engine.requests[-2].prompt_ids, engine.requests[-1].prompt_ids
    assert last[: len(before)] == before
    return last[len(before) :]


def toy_text(request: GenerateRequest) -> str:
    raw = toy_tokenizer()._tokenizer
    return str(raw.decode(request.prompt_ids, skip_special_tokens=False))
