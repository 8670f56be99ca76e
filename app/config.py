"""Every setting of the server, from defaults, a TOML file, `PAGETURNER_*` variables and the command line."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engine.config import ConfigError, EngineConfig

PREFIX = "PAGETURNER_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
SECRET_SETTINGS = ("api_key", "redis_url")
OTHER_ROOMS_VARIABLES = frozenset({"PAGETURNER_CACHE", "PAGETURNER_NATIVE_ISA"})
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

MIB = 1024 * 1024


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and where it came from."""


def data_folder() -> Path:
    """Where this platform keeps an application's data."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pageturner"
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "pageturner"


def _listed(value: Any) -> Any:
    """Lists come as "a, b" from variables and as arrays from TOML."""
    if isinstance(value, str):
        return [part for part in (piece.strip() for piece in value.split(",")) if part]
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_listed)]


def setting(default: Any, help: str, **more: Any) -> Any:
    return Field(default, description=help, **more)


class Settings(BaseSettings):
    """All settings, checked. Use `load_settings` to read them; names that are not here are refused.

    Later sources win: defaults, TOML file, secret files, `PAGETURNER_*` variables, arguments (from the
    command line).
    """

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, env_prefix=PREFIX, env_ignore_empty=True
    )

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    data_dir: Path = Field(default_factory=data_folder, description="folder for everything that is kept")
    redis_url: SecretStr | None = setting(
        None, "Redis or Valkey to keep conversations in; without one a private server runs in the data folder"
    )
    api_key: Secrets = setting((), "key a client must send; several are several owners")
    insecure: bool = setting(
        False,
        "allow listening beyond this machine without a key: whoever reaches the port may use the server",
    )
    allowed_origins: Names = setting((), "other web origins whose pages may use the server")
    allowed_hosts: Names = setting((), 'host names the server answers to; "*" is any')

    max_sockets: int = setting(1024, "websockets open at once", ge=1)
    max_frame_bytes: int = setting(16 * MIB, "largest frame or request body taken", ge=1024)
    outbox_bytes: int = setting(MIB, "bytes that may wait for one client to read", ge=4096)
    send_deadline: float = setting(12.0, "seconds a client may take to read a frame", gt=0)
    queue_depth: int = setting(512, "turns that may wait on one websocket", ge=1)
    drain_timeout: float = setting(30.0, "seconds running answers get to finish when the server stops", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least level that is logged")
    log_format: Literal["auto", "json", "console"] = setting("auto", "auto is text on a terminal, else JSON")

    model: str | None = setting(
        None, "a model: hub id, folder or .gguf file; SmolLM2-135M-Instruct by default"
    )
    served_model_name: str | None = setting(None, "the name clients use for the model")
    dtype: str = setting("auto", "of weights and KV: auto, float32, bfloat16 or float16")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    block_size: int = setting(16, "tokens a KV block holds: 8, 16, 32, 64 or 128")
    kv_memory: str | int | None = setting(None, "memory for KV blocks, such as 2GiB")
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use, without kv_memory")
    max_num_seqs: int = setting(64, "requests that run at once")
    max_num_batched_tokens: int | None = setting(None, "tokens of one step")
    max_model_len: int | None = setting(None, "longest prompt and answer together, in tokens")
    enable_prefix_caching: bool = setting(True, "keep and reuse KV between requests")
    threads: int | None = setting(None, "CPU threads of the engine")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        secrets = InitSettingsSource(settings_cls, _secrets_from_files(os.environ))
        return init_settings, env_settings, secrets, TomlConfigSettingsSource(settings_cls)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key.get_secret_value() for key in self.api_key)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names to answer to. Without a key nothing else keeps other people's pages out."""
        if self.allowed_hosts:
            return self.allowed_hosts
        if self.api_key:
            return ("*",)
        return (*LOOPBACK_NAMES, self.host)

    @property
    def engine(self) -> EngineConfig:
        """The engine's part. Raises `SettingsError`."""
        shared = EngineConfig.__dataclass_fields__.keys() & Settings.model_fields.keys()
        try:
            return EngineConfig(**{name: getattr(self, name) for name in shared})
        except ConfigError as exc:
            raise SettingsError(str(exc)) from None

    def check(self) -> None:
        """What no single field can tell. Raises `SettingsError`."""
        _ = self.engine
        if not self.loopback and not self.api_key and not self.insecure:
            raise SettingsError(
                f"host: {self.host} can be reached from other machines and no api_key is set, so anyone "
                "could use this server. Set api_key (PAGETURNER_API_KEY, --api-key), listen on 127.0.0.1, "
                "or, behind a proxy that lets only your users in, pass --insecure."
            )

    def redacted(self) -> dict[str, Any]:
        """Every setting as plain values, secrets hidden."""
        shown = self.model_dump(mode="json")
        shown["api_key"] = ["********"] * len(self.api_key)
        shown["redis_url"] = None if self.redis_url is None else "********"
        return shown


def load_settings(given: Mapping[str, Any] | None = None, *, config: Path | None = None) -> Settings:
    """Settings from all sources; `given` is the command line, where None is "not given".

    Secrets can be files: PAGETURNER_API_KEY_FILE and PAGETURNER_REDIS_URL_FILE name them.
    Raises `SettingsError` for a value that does not fit or a name that is no setting.
    """
    path = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if path is not None and not path.is_file():
        raise SettingsError(f"config: there is no file {path}")
    _refuse_unknown_variables(os.environ)

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=path)

    arguments = {name: value for name, value in (given or {}).items() if value is not None}
    try:
        settings = FromFile(**arguments)
    except (OSError, UnicodeDecodeError, TOMLDecodeError) as exc:
        raise SettingsError(f"config: {path} cannot be read: {exc}") from None
    except ValidationError as exc:
        raise _explained(exc, arguments, path) from None
    settings.check()
    return settings


def _explained(exc: ValidationError, arguments: Mapping[str, Any], path: Path | None) -> SettingsError:
    first = exc.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    if name in arguments:
        where = f"--{name.replace('_', '-')}"
    elif os.environ.get(PREFIX + name.upper()):
        where = PREFIX + name.upper()
    else:
        where = str(path)
    reason = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
    return SettingsError(f"{name}: {reason} ({where})")


def _secrets_from_files(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in SECRET_SETTINGS:
        variable = f"{PREFIX}{name.upper()}_FILE"
        if file := environ.get(variable):
            try:
                values[name] = Path(file).read_text("utf-8").strip()
            except OSError as exc:
                raise SettingsError(f"{variable}: {file} cannot be read: {exc.strerror}") from None
    return values


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """A misspelt variable would otherwise be silently without effect."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    known |= {f"{PREFIX}{name.upper()}_FILE" for name in SECRET_SETTINGS} | {CONFIG_VARIABLE}
    known |= OTHER_ROOMS_VARIABLES
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            raise SettingsError(f"{variable}: there is no such setting")
