"""The documents say what the code does."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.models import ResponseCreate

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
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


def written() -> Iterator[tuple[str, str]]:
    """Name and arguments (without parentheses) of everything in the architecture's Python blocks.

    An indented line is a member of the class above it.
    """
    owner = ""
    for block in re.findall(r"```python\n(.*?)```", ARCHITECTURE, re.DOTALL):
        for line in block.splitlines():
            found = re.match(r"( *\.?)([\w.]+)(?:\((.*?)\))?\s*(?:#|$)", line)
            assert found is not None, line
            name = f"{owner}.{found[2]}" if found[1] else found[2]
            owner = owner if found[1] else name
            yield name, found[3] or ""


def resolve(name: str) -> Any:
    for cut in range(name.count("."), 0, -1):
        module, path = ".".join(name.split(".")[:cut]), name.split(".")[cut:]
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for part in path:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def in_short(signature: inspect.Signature) -> str:
    """Names and defaults only, as a reader wants them."""
    plain = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(inspect.Signature(plain))[1:-1]


@pytest.mark.parametrize(("name", "arguments"), list(written()))
def test_every_signature_of_the_architecture_is_that_of_the_code(name: str, arguments: str) -> None:
    try:
        found = resolve(name)
    except AttributeError:
        # An attribute that only instances have.
        owner, attribute = name.rsplit(".", 1)
        assert f"self.{attribute}" in inspect.getsource(resolve(owner))
        return
    if arguments or inspect.isfunction(found):
        assert arguments == in_short(inspect.signature(found))


def modules() -> Iterator[str]:
    """Every module that the architecture's tables of two rooms name."""
    for room, text in re.findall(r"## (engine|app)\n(.*?)(?=\n## |\Z)", ARCHITECTURE, re.DOTALL):
        for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
            yield from (f"{room}/{name}" for name in re.findall(r"`([\w/]+)`", cell))


def test_the_architecture_names_every_module_of_engine_and_app() -> None:
    here = {
        f"{room}/{path.stem if path.is_file() else path.name + '/'}"
        for room in ("engine", "app")
        for path in (ROOT / room).iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set(modules()) == here - {"engine/__init__", "app/__init__", "engine/logs"}


@pytest.mark.parametrize("room", ["cache", "sessions"])
def test_every_module_that_a_rooms_page_lists_is_there(room: str) -> None:
    text = (ROOT / "docs" / f"{room}.md").read_text("utf-8")
    table = re.search(r"## Modules\n(.*?)(?=\n## |\Z)", text, re.DOTALL)
    assert table is not None
    for cell in re.findall(r"^\| (`.*?) \|", table[1], re.MULTILINE):
        for name in re.findall(r"`([\w/]+)`", cell):
            assert (ROOT / room / f"{name}.py").is_file() or (ROOT / room / name).is_dir(), name


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z]+/[\w/]+\.py)`", ARCHITECTURE))))
def test_every_file_the_architecture_names_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


DOCUMENTS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_leads_to_a_file(document: Path) -> None:
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text("utf-8")):
        assert target.startswith("http") or (folder / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = (ROOT / document).read_text("utf-8")
    code = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    named = re.findall(r"^make ([a-z]+)", code, re.MULTILINE) + re.findall(r"`make ([a-z]+)", text)
    assert set(named) <= targets
