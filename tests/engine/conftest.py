"""Models the engine's tests share: the default one, read once, and tiny random ones of many architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.model.loader import LoadedModel, load_model
from engine.model.source import ModelSource, default_model_file, resolve_model
from tests.engine.model.tiny import save_tiny


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's `.gguf` file."""
    return default_model_file()


@pytest.fixture(scope="session")
def default_source() -> ModelSource:
    return resolve_model(None)


@pytest.fixture(scope="session")
def default_model(default_source: ModelSource) -> LoadedModel:
    """The default model in float32. Its converted weights stay in the cache from run to run."""
    return load_model(default_source, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def default_original(default_model: LoadedModel, default_source: ModelSource) -> Any:
    """The same weights in float32 as transformers runs them."""
    from engine.model.loader import open_original

    return open_original(default_source, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random model, by the names in `tests.engine.model.tiny.TINY`."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("tiny") / name
            save_tiny(name, folders[name])
        return folders[name]

    return find
