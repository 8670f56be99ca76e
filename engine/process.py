"""Starting and ending one engine process, and reading what it sends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import sysconfig
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

from engine.config import EngineConfig
from engine.ipc import FrameDecoder, Message, encode_frame

EXIT_PATIENCE_S = 5.0


class EngineProcess:
    """A child running `engine.server`, joined by a socket pair: no path, no port, nobody else can connect."""

    def __init__(self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, config: EngineConfig) -> EngineProcess:
        """Start a process and send it its settings. Never forked: torch's threads don't survive that."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "engine.server",
                "--fd",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        engine = cls(process, reader, writer)
        engine.send({"type": "start", "config": config.to_dict()})
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Queue a message; what is sent to an ended process is lost."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def messages(self) -> AsyncIterator[Message]:
        """What the process sends, until it ends. Raises `FrameError` on garbage."""
        decoder = FrameDecoder()
        while True:
            try:
                data = await self._reader.read(1 << 16)
            except OSError:
                return
            if not data:
                return
            for message in decoder.feed(data):
                yield message

    async def end(self, *, patient: bool) -> str:
        """Close the connection, see the process out, and say how it ended. Kills it if it takes too long.

        patient: give it a few seconds to finish its step and go by itself.
        """
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        try:
            status = await asyncio.wait_for(self._process.wait(), EXIT_PATIENCE_S if patient else 0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            status = await self._process.wait()
        if status >= 0:
            return f"it exited with status {status}"
        return f"it was killed by {signal.Signals(-status).name}"


def _environment() -> dict[str, str]:
    """Ours, such that the child finds this package when it runs from a source tree."""
    environment = dict(os.environ)
    # Blocks of one sequence lie far apart: with small pages, finding them costs as much as reading them.
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    root = str(Path(__file__).resolve().parent.parent)
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    return environment
