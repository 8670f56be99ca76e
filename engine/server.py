"""The engine process: `python -m engine.server --fd N`, N being its end of a unix socket pair.

The front that starts it sends `start` with the settings; then requests flow one way and outputs the other.
The process ends when its parent does: by the socket, and on Linux by a signal too, so that loading a model
does not outlive whoever wanted it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from engine.api import RequestError, pack_record, unpack_request
from engine.build import build_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.ipc import Channel, FrameError, Message, pack_output
from engine.logs import log_to_stderr

log = logging.getLogger(__name__)

EXIT_BAD_FRAMES = 65
EXIT_CANNOT_START = 78


class Server:
    """Feeds one engine from one channel."""

    def __init__(self, channel: Channel, engine: Engine, *, check_integrity: bool = False) -> None:
        self._channel = channel
        self._engine = engine
        self._check_integrity = check_integrity
        self._frame_error: FrameError | None = None

    def run(self) -> None:
        """Step while there is work, sleep while there is none, return when the front is gone.

        Raises `FrameError` on garbage: nothing that comes after it can be understood.
        """
        while True:
            self._take_messages(wait=not self._engine.has_work)
            if self._frame_error is not None:
                raise self._frame_error
            if self._channel.closed:
                return
            outputs = self._engine.step(self._take_messages)
            if outputs:
                self._channel.send(
                    {"type": "outputs", "outputs": [pack_output(output) for output in outputs]}
                )
            if self._check_integrity and not self._engine.has_work:
                self._engine.check_integrity()

    def _take_messages(self, *, wait: bool = False) -> None:
        if self._frame_error is not None:
            return
        try:
            messages = self._channel.receive(wait=wait)
        except FrameError as error:
            self._frame_error = error
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        try:
            if kind == "submit":
                self._submit(message["request"])
            elif kind == "abort":
                self._engine.abort(message["request_id"])
            elif kind == "release":
                self._engine.release(message["tenant"], message["branch"])
            elif kind == "stats":
                self._channel.send({"type": "stats", "stats": pack_record(self._engine.stats())})
            else:
                raise KeyError("type")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            # Well framed, but not what was agreed: say so and go on, the stream itself is intact.
            log.exception("a message of type %s could not be read", kind)
            self._channel.send({"type": "fault", "message": f"{kind}: {type(error).__name__}: {error}"})

    def _submit(self, fields: dict[str, Any]) -> None:
        request_id = fields["request_id"]
        try:
            self._engine.add_request(unpack_request(fields))
        except RequestError as error:
            self._refuse(request_id, error)
        except (KeyError, TypeError, ValueError) as error:
            # It names a request, so somebody waits for an answer to it.
            self._refuse(request_id, RequestError(f"a field is missing or has the wrong type: {error}"))

    def _refuse(self, request_id: str, error: RequestError) -> None:
        refusal = {"message": error.message, "param": error.param, "code": error.code}
        self._channel.send({"type": "refused", "request_id": request_id, **refusal})


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends. Elsewhere the closed socket must do."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve(channel: Channel) -> int:
    """Wait for the settings, load, serve. Returns the exit status."""
    try:
        started = _start(channel)
        if started is None:
            return 0
        engine, config = started
    except Exception as error:
        log.exception("the engine cannot start")
        channel.send({"type": "failed", "message": str(error) or type(error).__name__})
        channel.flush()
        return EXIT_CANNOT_START
    # What is loaded stays; looking through it at every collection would only cost time.
    gc.collect()
    gc.freeze()
    channel.send({"type": "ready", "info": pack_record(engine.info)})
    try:
        Server(channel, engine, check_integrity=config.check_integrity).run()
    except FrameError as error:
        log.error("the connection carries garbage: %s", error)
        return EXIT_BAD_FRAMES
    return 0


def _start(channel: Channel) -> tuple[Engine, EngineConfig] | None:
    """The engine that the first message asks for; None if the front is gone before it says what it wants."""
    messages: list[Message] = []
    while not messages:
        messages = channel.receive(wait=True)
        if channel.closed:
            return None
    if len(messages) != 1 or messages[0]["type"] != "start":
        raise ValueError("expected a start message, and nothing else before the engine is ready")
    config = EngineConfig.from_dict(messages[0]["config"])

    def report(stage: str, fraction: float) -> None:
        channel.send({"type": "progress", "stage": stage, "fraction": fraction})

    return build_engine(config, report), config


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.server", description="One engine process.")
    parser.add_argument(
        "--fd", type=int, required=True, help="the number of an inherited, connected unix socket"
    )
    arguments = parser.parse_args()
    log_to_stderr()
    die_with_parent()
    # Ctrl-C goes to every process of a terminal; what it means for the engine is for the front to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=arguments.fd))
    try:
        return serve(channel)
    finally:
        channel.close()


def leave(status: int) -> NoReturn:
    """End the process without taking it apart: the system does that faster, and libraries that complain about
    what is left of them (triton, which torch imports wherever it is there) have no occasion to.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
