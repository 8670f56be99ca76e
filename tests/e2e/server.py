"""A real server in a process of its own, as `pageturner serve` starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240
STOP_SECONDS = 60


class ServerProcess:
    """Started on a free port; `url` is known once it is ready. Log lines go to a file in the data folder."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self._log = data_dir / "server.log"
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PAGETURNER_")
        }
        command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--data-dir", str(data_dir)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--log-format", "json", *flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.url = self._wait_until_serving()

    @property
    def pid(self) -> int:
        return self._process.pid

    def engine_pid(self) -> int:
        """The engine process, found among our children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in map(int, children):
            if b"engine.server" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        raise LookupError("the server has no engine process")

    def lines(self) -> list[dict[str, Any]]:
        """The log so far; what is no JSON is left out."""
        found = []
        for line in self._log.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> dict[str, float]:
        """Every sample without its labels, but for a block count's state: `kv_blocks.free`."""
        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                name = sample.name.removeprefix("pageturner:")
                state = sample.labels.get("state")
                samples[f"{name}.{state}" if state else name] = sample.value
        return samples

    def wait_until_idle(self) -> dict[str, float]:
        """The metrics once nothing runs and nothing waits."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            metrics = self.metrics()
            if metrics.get("num_requests_running") == metrics.get("num_requests_waiting") == 0:
                return metrics
            assert time.monotonic() < deadline, "the engine never became idle"
            time.sleep(0.05)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/readyz")
                return
            except OSError:
                assert time.monotonic() < deadline, "the server never became ready"
                time.sleep(0.2)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self._process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """End it, by force if it must be; the exit status."""
        if self._process.poll() is None:
            self.interrupt()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _wait_until_serving(self) -> str:
        start = len(self.lines())
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for line in self.lines()[start:]:
                if line.get("event") == "serving":
                    url: str = line["url"]
                    return url
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-4000:]}")
