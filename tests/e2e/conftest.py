"""One real server with the default model for all end-to-end tests, and clients of the unmodified SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.server import ServerProcess

FLAGS = ("--dtype", "float32", "--kv-memory", "512MiB", "--max-model-len", "4096", "--send-deadline", "2")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server"), *FLAGS)
    yield process
    assert process.stop() == 0


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Servers of a test's own, all on one data folder."""
    started: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        started.append(ServerProcess(tmp_path, *FLAGS, *flags))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    """The unmodified SDK, told to be strict about what it gets."""
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made
