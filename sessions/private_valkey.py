"""A Valkey server of our own in the data folder, for those who have none: the same store, a real server."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
MAX_SOCKET_PATH = 100
"""Kernels limit a unix socket's path to 104 or 108 bytes."""


class PrivateValkey:
    """Runs `valkey-server` with its data in `folder`, reachable over a unix socket of this user's own.

    Writes are on disk within a second. The server ends with `stop`, and also when this process dies in any
    way: a guard process watches a pipe that only we hold open (`sessions.valkey_guard`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guard: asyncio.subprocess.Process | None = None
        self._lock: int | None = None
        self._socket_folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket = folder / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def start(self) -> None:
        """Raises `RuntimeError` when another server uses the folder, or with Valkey's own words."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        await self._take_folder()
        try:
            if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
                self._socket_folder = tempfile.TemporaryDirectory(prefix="pageturner-")
                self._socket = Path(self._socket_folder.name) / "valkey.sock"
            await asyncio.to_thread(_end_orphan, self._folder)
            await self._start_guard()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server; everything is on disk afterwards."""
        guard, self._guard = self._guard, None
        if guard is not None and guard.returncode is None:
            assert guard.stdin is not None
            guard.stdin.close()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await guard.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    guard.kill()
                await guard.wait()
        if self._socket_folder is not None:
            self._socket_folder.cleanup()
            self._socket_folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _take_folder(self) -> None:
        self._lock = os.open(self._folder / "valkey.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # Perhaps the one before us is just ending.
                if time.monotonic() > deadline:
                    os.close(self._lock)
                    self._lock = None
                    raise RuntimeError(f"another server uses the data folder {self._folder}") from None
                await asyncio.sleep(0.1)

    async def _start_guard(self) -> None:
        self._guard = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the guard needs nothing of ours, and our modules' names must not hide others
            str(Path(__file__).with_name("valkey_guard.py")),
            str(self._folder),
            str(self._socket),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal reaches the whole foreground group; the store must outlast the server's own
            # end.
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = (await self._guard.stdout.read(65536)).decode(errors="replace").strip()
        except TimeoutError:
            answer = f"no answer within {START_TIMEOUT_S:.0f} s"
        if answer != "ready":
            raise RuntimeError(f"the private Valkey server did not start: {answer or 'it ended at once'}")


def _end_orphan(folder: Path) -> None:
    """A server whose guard was killed may still hold the folder; the note it left says where it listens."""
    note = folder / "valkey.address"
    try:
        address = note.read_text()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(STOP_TIMEOUT_S)
        connection.connect(address)
        connection.sendall(b"SHUTDOWN\r\n")
        while connection.recv(4096):
            pass
    note.unlink(missing_ok=True)
