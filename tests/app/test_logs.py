"""Log lines never carry what was asked or answered."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from app import logs

SECRET = "what was asked"


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize("library", [False, True])
def test_a_traceback_shows_no_values(capsys: pytest.CaptureFixture[str], style: str, library: bool) -> None:
    logs.configure("info", style)

    def fail(prompt: str) -> None:
        text = prompt.upper()
        raise KeyError(len(text))

    try:
        fail(SECRET)
    except KeyError as exc:
        if library:
            logging.getLogger("some.library").exception("it failed")
        else:
            structlog.get_logger().error("it failed", exc_info=exc)
    lines = capsys.readouterr().err
    assert "it failed" in lines
    assert "KeyError" in lines
    assert "in fail" in lines or '"name": "fail"' in lines
    assert SECRET.lower() not in lines.lower()
