"""The `pageturner` command: serve, chat, doctor, config, version."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from app import doctor as checks
from app.chat import ChatError, chat_in_terminal
from app.config import Settings, SettingsError, load_settings
from app.flags import MODEL_GROUP, with_settings

DEFAULT_URL = "http://127.0.0.1:8000"
EXIT_USAGE = 2

cli = typer.Typer(
    help="Chat with your own model over a websocket; every conversation keeps its KV blocks between turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    cli()


def package_version() -> str:
    try:
        return importlib.metadata.version("pageturner")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _load(given: dict[str, Any], config: Path | None) -> Settings:
    try:
        return load_settings(given, config=config)
    except SettingsError as exc:
        raise _fail(str(exc)) from None


def _fail(message: str, status: int = EXIT_USAGE) -> typer.Exit:
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {_escaped(message)}", soft_wrap=True)
    return typer.Exit(status)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


@cli.command()
@with_settings
def serve(
    given: dict[str, Any],
    config: Path | None,
    model: str | None = typer.Argument(None, help="a hub id, a folder or a .gguf file"),
    model_flag: str | None = typer.Option(None, "--model", help="the same", rich_help_panel=MODEL_GROUP),
) -> None:
    """Serve a model: the page at /, the websocket and HTTP API under /v1."""
    if model and model_flag and model != model_flag:
        raise _fail("model: given twice, as an argument and as --model")
    settings = _load(given | ({"model": model or model_flag} if model or model_flag else {}), config)
    # Imported late: the other commands do not need what a server needs.
    from app.serving import serve_until_stopped

    try:
        status = serve_until_stopped(settings)
    except SettingsError as exc:
        raise _fail(str(exc)) from None
    raise typer.Exit(status)


@cli.command()
def chat(
    url: str = typer.Argument(DEFAULT_URL, help="address of a server"),
    api_key: str | None = typer.Option(None, "--api-key", envvar="PAGETURNER_API_KEY", help="its key"),
    instructions: str | None = typer.Option(None, "--system", help="instructions for every turn"),
) -> None:
    """Chat in the terminal. /new begins afresh, /quit ends, Ctrl-C stops an answer."""
    try:
        chat_in_terminal(url, api_key=api_key, instructions=instructions)
    except ChatError as exc:
        raise _fail(str(exc), 1) from None


@cli.command()
@with_settings
def doctor(given: dict[str, Any], config: Path | None) -> None:
    """Check that everything a server needs is there."""
    settings = _load(given, config)
    results = asyncio.run(checks.examine(settings))
    table = Table(show_header=True, header_style="bold")
    for column in ("check", "result", "details"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(
            result.name, f"[{result.verdict.colour}]{result.verdict.value}[/]", _escaped(result.details)
        )
    Console().print(table)
    if any(result.verdict is checks.Verdict.BROKEN for result in results):
        raise typer.Exit(1)


@cli.command("config")
@with_settings
def show_config(given: dict[str, Any], config: Path | None) -> None:
    """Show every setting as it would be used; secrets are hidden."""
    settings = _load(given, config)
    table = Table(show_header=True, header_style="bold")
    for column in ("setting", "value", "meaning"):
        table.add_column(column, overflow="fold")
    for name, value in settings.redacted().items():
        shown = ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)
        table.add_row(name, _escaped(shown), _escaped(Settings.model_fields[name].description or ""))
    Console().print(table)


@cli.command()
def version() -> None:
    """Show the version."""
    print(package_version())


if __name__ == "__main__":
    main()
