"""A real Chromium for the page, and the page's files served alone."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from starlette.applications import Starlette

from app.page import page_routes

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


KNOWN_ANSWERS = """
    const Native = WebSocket;
    window.sockets = [];
    window.WebSocket = class extends Native {
        constructor(...given) {
            super(...given);
            window.sockets.push(this);
        }
        send(data) {
            const frame = JSON.parse(data);
            if (frame.type === "response.create") frame.temperature = 0;
            super.send(JSON.stringify(frame));
        }
    };
"""
"""Runs before the page's own scripts: answers are greedy, and a test can cut a connection (`sockets`)."""


def find_chromium() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        reason = "no Chromium found; install it or set CHROMIUM=/path/to/chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": 1200, "height": 800}) as context:
        context.set_default_timeout(30_000)
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab. An error that nothing catches, a broken content policy included, fails the test that made it."""
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None
    )
    yield page
    assert errors == []


@pytest.fixture(scope="module")
def page_files() -> Iterator[str]:
    """The address of a server that has the page's files and nothing behind them."""
    config = uvicorn.Config(Starlette(routes=page_routes()), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive(), "the file server did not start"
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
