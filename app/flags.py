"""One command-line flag a setting, made from the settings themselves so that none can be forgotten."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from app.config import Settings

GROUPS = {
    "Where": ("host", "port", "data_dir", "redis_url"),
    "Who may ask": ("api_key", "insecure", "allowed_origins", "allowed_hosts"),
    "Limits and logs": (
        "max_sockets",
        "max_frame_bytes",
        "outbox_bytes",
        "send_deadline",
        "queue_depth",
        "drain_timeout",
        "log_level",
        "log_format",
    ),
}
MODEL_GROUP = "Model and engine"
LISTS = {"api_key": "--api-key", "allowed_origins": "--allowed-origin", "allowed_hosts": "--allowed-host"}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """`command(given, config, ...)` as a function typer can read: every setting is a parameter of it.

    `given` holds what was on the command line and nothing else.
    """
    own = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name not in ("given", "config")
    ]
    names = [name for name in Settings.model_fields if name not in {parameter.name for parameter in own}]

    def wrapper(config: Path | None, **values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        given = {name: value for name, value in given.items() if value not in (None, [])}
        command(given=given, config=config, **values)

    config = typer.Option(None, "--config", help="a TOML file with settings (or PAGETURNER_CONFIG)")
    parameters = [
        *own,
        _parameter("config", Path | None, config),
        *(_parameter(name, _flag_type(name), _flag(name)) for name in names),
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_type(name: str) -> Any:
    if name in LISTS:
        return list[str] | None
    # Everything else is read as text and checked once, by the settings, with one kind of error message.
    return bool | None if Settings.model_fields[name].annotation is bool else str | None


def _flag(name: str) -> Any:
    field = Settings.model_fields[name]
    flag = f"--{name.replace('_', '-')}"
    declarations = [LISTS.get(name, flag)]
    if field.annotation is bool:
        declarations = [f"{flag}/--no-{flag[2:]}"]
    group = next((title for title, members in GROUPS.items() if name in members), MODEL_GROUP)
    help = field.description or ""
    if field.default_factory is None and field.default not in (None, (), False):
        help += f" (default: {field.default})"
    return typer.Option(None, *declarations, help=help, rich_help_panel=group, show_default=False)
