"""`pageturner serve`: the real back end, its progress on the terminal, and the server around it."""

from __future__ import annotations

import os
import sys

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from app import logs
from app.assembly import assemble
from app.backend import Backend
from app.config import Settings, SettingsError
from app.main import create_app
from app.metrics import Metrics
from app.server import listen, run
from kernels.conflict import KernelsConflict, ensure_no_conflict

log = structlog.get_logger()


class LoadingDisplay:
    """What is being loaded: a live line on a terminal, one log line a stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""

    def show(self, stage: str, fraction: float | None) -> None:
        if not self._console.is_terminal:
            if stage != self._stage:
                log.info("loading", stage=stage)
        elif self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(stage, total=1.0)
        if self._task is not None:
            # A stage that does not say how far it is shows a moving bar.
            if stage != self._stage:
                self._progress.reset(self._task, description=stage)
            self._progress.update(
                self._task, completed=fraction or 0.0, total=None if fraction is None else 1.0
            )
        self._stage = stage

    def ready(self, model: str, url: str) -> None:
        self.stop()
        if self._console.is_terminal:
            self._console.print(f"[bold green]Pageturner serves {model} on[/] {url}")
        else:
            log.info("serving", model=model, url=url)

    def stop(self) -> None:
        if self._task is not None:
            self._progress.stop()


def serve_until_stopped(settings: Settings) -> int:
    """Returns the exit status. Raises `SettingsError` when there is no use in starting."""
    try:
        ensure_no_conflict()
    except KernelsConflict as exc:
        raise SettingsError(str(exc)) from None
    logs.configure(settings.log_level, settings.log_format)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    listener = listen(settings.host, settings.port)
    display = LoadingDisplay(Console(file=sys.stderr, highlight=False))
    metrics = Metrics()
    backend = Backend(lambda on_stage: assemble(settings, metrics, on_stage), display.show)
    app = create_app(settings, backend, metrics)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    status = run(app, settings, listener, lambda: display.ready(backend.parts.served_model_name, url))
    display.stop()
    if backend.failure is not None:
        print(f"error: {backend.failure}", file=sys.stderr)
    return status
