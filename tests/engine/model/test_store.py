"""Entries of the store are whole, checked, and built again when damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.model.store import fetch


def write_hello(folder: Path) -> None:
    (folder / "hello").write_text("hello")


def refuse(folder: Path) -> None:
    raise AssertionError(f"{folder} need not be built")


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    entry = fetch(tmp_path / "deep" / "entry", write_hello)
    assert (entry / "hello").read_text() == "hello"
    assert fetch(tmp_path / "deep" / "entry", refuse) == entry


def damage_change(entry: Path) -> None:
    (entry / "hello").write_text("jello")


def damage_cut(entry: Path) -> None:
    (entry / "hello").write_text("hel")


def damage_missing(entry: Path) -> None:
    (entry / "hello").unlink()


def damage_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text("{")


def damage_odd_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('["what"]')


def damage_no_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_change, damage_cut, damage_missing, damage_manifest, damage_odd_manifest, damage_no_manifest],
)
def test_a_damaged_entry_is_built_again_with_a_warning(
    damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = fetch(tmp_path / "entry", write_hello)
    damage(entry)  # type: ignore[operator]  # one of the functions above
    with caplog.at_level(logging.WARNING):
        fetch(tmp_path / "entry", write_hello)
    assert (entry / "hello").read_text() == "hello"
    assert "damaged" in caplog.text


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_hello(folder)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fetch(tmp_path / "entry", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        fetch(tmp_path / "entry", write_hello)
        (folder / "hello").write_text("late")

    entry = fetch(tmp_path / "entry", overtaken)
    assert (entry / "hello").read_text() == "hello"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_place_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        fetch(tmp_path / "file" / "entry", write_hello)
