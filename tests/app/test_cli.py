"""The command: settings as flags, clear refusals, and what doctor and config show."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app.chat import ChatError, socket_url, summary
from app.cli import cli
from app.config import Settings
from app.doctor import CHECKS, Verdict, examine

ROOT = Path(__file__).resolve().parents[2]
WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PAGETURNER_"):
            monkeypatch.delenv(name)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), env=WIDE | environment)


def test_every_setting_is_a_flag() -> None:
    shown = run("serve", "--help").output
    for name in Settings.model_fields:
        flag = "--" + name.replace("_", "-").replace("allowed-origins", "allowed-origin")
        assert flag.replace("allowed-hosts", "allowed-host") in shown, name
    assert "(default: 8000)" in shown


def test_config_shows_what_would_be_used_and_hides_secrets() -> None:
    shown = run(
        "config",
        "--port",
        "9001",
        "--no-enable-prefix-caching",
        "--api-key",
        "topsecret",
        PAGETURNER_BLOCK_SIZE="32",
    ).output
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line
    }
    assert (rows["port"], rows["block_size"], rows["enable_prefix_caching"]) == ("9001", "32", "False")
    assert rows["api_key"] == "********"
    assert "topsecret" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "--port", "x"), "port: Input should be a valid integer"),
        (("serve", "--host", "0.0.0.0"), "no api_key is set"),
        (("serve", "--block-size", "5"), "block_size: expected 8, 16, 32, 64 or 128, got 5"),
        (("serve", "one", "--model", "two"), "model: given twice"),
        (("serve", "--config", "/nowhere.toml"), "there is no file /nowhere.toml"),
        (("chat", "ftp://x"), "url: expected an address such as http://127.0.0.1:8000"),
        (("chat", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
    ],
)
def test_a_refusal_says_what_to_change(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port)
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in result.output


def test_a_model_that_is_not_there_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "app.cli",
            "serve",
            "/nowhere/model.gguf",
            "--port",
            "0",
            "--data-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == (
        "error: model /nowhere/model.gguf: there is no such file or folder"
    )


def test_a_signal_while_loading_ends_the_server_cleanly(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{") and json.loads(line).get("stage") == "tokenizer":
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert "Traceback" not in rest


def test_a_package_that_hides_our_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.9" if name == "kernels" else found(name)
    )
    result = run("serve", "--port", "0")
    assert result.exit_code == 2
    assert "'kernels' (0.9) is installed" in result.output


def test_the_documentation_names_every_setting() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    for name, field in Settings.model_fields.items():
        assert f"| `{name}`" in text
        assert field.description is not None
        assert field.description in text, name


def test_version_is_shown() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert result.output.strip()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_doctor_finds_nothing_broken_here(tmp_path: Path) -> None:
    findings = await examine(Settings(port=0, data_dir=tmp_path / "new" / "folder"))
    assert [finding.name for finding in findings] == list(CHECKS)
    assert {finding.name: finding.details for finding in findings if finding.verdict is Verdict.BROKEN} == {}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_doctor_names_what_is_broken(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        findings = await examine(
            Settings(
                port=taken.getsockname()[1],
                data_dir=blocked / "folder",
                model="/nowhere.gguf",
                redis_url="redis://:hidden@127.0.0.1:1",  # type: ignore[arg-type]
            )
        )
    broken = {finding.name: finding.details for finding in findings if finding.verdict is Verdict.BROKEN}
    assert set(broken) == {"port", "data folder", "model", "store"}
    assert "hidden" not in str(broken)
    assert broken["port"].startswith("port: cannot listen on 127.0.0.1")


def test_doctor_exits_with_its_verdict(tmp_path: Path) -> None:
    assert run("doctor", "--port", "0", "--data-dir", str(tmp_path)).exit_code == 0
    broken = run("doctor", "--port", "0", "--data-dir", str(tmp_path), "--model", "/nowhere.gguf")
    assert broken.exit_code == 1
    assert "broken" in broken.output


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/responses"),
        ("https://chat.example/v1/", "wss://chat.example/v1/responses"),
        ("localhost:9", "ws://localhost:9/v1/responses"),
        ("https://chat.example/below", "wss://chat.example/below/v1/responses"),
    ],
)
def test_chat_understands_addresses(given: str, address: str) -> None:
    assert socket_url(given) == address


@pytest.mark.parametrize("given", ["", "ftp://x", "http://"])
def test_chat_refuses_other_addresses(given: str) -> None:
    with pytest.raises(ChatError):
        socket_url(given)


def test_chat_tells_what_a_turn_cost() -> None:
    usage = {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 40}, "output_tokens": 7}
    told = summary({"status": "completed", "usage": usage}, 1.25)
    assert told == "10 new tokens read, 40 reused, 7 written in 1.2 s"
    assert summary({"status": "cancelled", "usage": usage}, 1.25).endswith("cancelled")
    failed = {"status": "failed", "error": {"message": "The engine stopped."}, "usage": None}
    assert summary(failed, 1.0) == "failed: The engine stopped."
