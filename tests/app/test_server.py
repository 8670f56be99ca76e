"""When the server ends by itself."""

from __future__ import annotations

import asyncio

from app.config import Settings
from app.main import create_app
from app.server import EXIT_FAILED, listen, run
from tests.app.support import ScriptedSessions, backend


def test_a_server_whose_engine_is_lost_ends_and_says_why() -> None:
    lost = asyncio.Event()
    parts = backend(ScriptedSessions(), lost=lost)
    app = create_app(Settings(), parts)
    assert run(app, Settings(), listen("127.0.0.1", 0), on_ready=lost.set) == EXIT_FAILED
    assert parts.failure == "the engine ended too often"
