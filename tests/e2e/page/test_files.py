"""The page's files: what is vendored is what the manifest says, all of it under the content policy."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.page import STATIC, page_routes

VENDOR = STATIC / "vendor"
PAGE = STATIC.parent
MANIFEST = json.loads((VENDOR / "manifest.json").read_text("utf-8"))
OWN_MODULES = sorted((STATIC / "js").rglob("*.js"))


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


def test_every_vendored_file_is_in_the_manifest_and_unchanged() -> None:
    found = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert found == {name: entry["sha256"] for name, entry in MANIFEST["files"].items()}


def test_every_vendored_package_is_the_locked_version_with_its_licence() -> None:
    lock = json.loads((PAGE / "package-lock.json").read_text("utf-8"))
    for name, package in MANIFEST["packages"].items():
        assert package["version"] == lock["packages"][f"node_modules/{name}"]["version"]
        assert package["license"]
        assert (VENDOR / package["text"]).read_text("utf-8").strip()
    assert set(MANIFEST["packages"]) == set(lock["packages"][""]["dependencies"])


def test_the_lock_file_names_no_download_address() -> None:
    lock = json.loads((PAGE / "package-lock.json").read_text("utf-8"))
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []


@pytest.mark.parametrize("module", OWN_MODULES, ids=lambda path: path.relative_to(STATIC).as_posix())
def test_every_import_names_a_file_that_exists(module: Path) -> None:
    source = module.read_text("utf-8")
    imports = re.findall(r'^(?:import|export)\b[^;]*?\bfrom "([^"]+)";', source, re.MULTILINE | re.DOTALL)
    assert len(imports) == len(re.findall(r"^import\b", source, re.MULTILINE))
    for name in imports:
        assert name.startswith("."), f"{name} is not a relative import"
        assert (module.parent / name).resolve().is_file(), f"{name} does not exist"


def test_every_text_a_view_names_exists() -> None:
    strings = (STATIC / "js" / "strings.js").read_text("utf-8")
    readers = [module for module in OWN_MODULES if 'strings.js";' in module.read_text("utf-8")]
    assert readers
    for module in readers:
        for name in re.findall(r"(?<![.\w])text\.(?:said\.|usage\.)?(\w+)", module.read_text("utf-8")):
            assert re.search(rf"^ +{name}[:(]", strings, re.MULTILINE), f"{module.name} uses text.{name}"


class Inline(HTMLParser):
    """Collects what a policy without 'unsafe-inline' would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag == "style" or (tag == "script" and "src" not in names):
            self.found.append(tag)
        self.found += [name for name in names if name == "style" or name.startswith("on")]


def test_the_page_has_no_inline_script_or_style(client: TestClient) -> None:
    parser = Inline()
    parser.feed(client.get("/").text)
    assert parser.found == []


@pytest.mark.parametrize(
    "path", ["/", "/static/js/main.js", "/static/css/base.css", "/static/vendor/preact.js"]
)
def test_every_file_carries_a_policy_that_allows_only_these_files(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/static/js/main.js", "/static/vendor/highlight/core.js"])
def test_modules_are_served_as_javascript(client: TestClient, path: str) -> None:
    assert client.get(path).headers["content-type"].split(";")[0] in (
        "text/javascript",
        "application/javascript",
    )


@pytest.mark.parametrize("path", ["/static/../__init__.py", "/static/%2e%2e/package.json", "/static/js/"])
def test_nothing_beside_the_static_files_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404
