"""A chat in the terminal, over the same websocket everyone uses."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson
from rich.console import Console
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import connect
from websockets.sync.connection import Connection

TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
TICK_SECONDS = 0.2
# As the page asks: small models lose the thread at the protocol's own default, a temperature of 1.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
HELP = "/new begins a new conversation, /quit ends. Ctrl-C stops an answer."


class ChatError(Exception):
    """The server cannot be reached, or the connection is gone; the message says why."""


def socket_url(url: str) -> str:
    """`http://host:port` (with or without `/v1`) as the websocket's address. Raises `ChatError`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise ChatError(f"url: expected an address such as http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/responses").removesuffix("/v1")
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, f"{path}/v1/responses", "", ""))


class Chat:
    """A conversation on an open connection: each turn names the one before, and sends only what is new."""

    def __init__(self, connection: Connection, instructions: str | None = None) -> None:
        self._connection = connection
        self._instructions = instructions
        self._parent: str | None = None

    def forget(self) -> None:
        self._parent = None

    def ask(self, text: str, write: Callable[[str], object], stopped: Callable[[], bool]) -> dict[str, Any]:
        """Send one message and write the answer as it comes. Returns the response object.

        `stopped` is asked a few times a second; once true, the answer is cancelled and its end awaited.
        Raises `ChatError` for what the server refuses.
        """
        create: dict[str, Any] = {"type": "response.create", "input": text, **SAMPLING}
        if self._parent is not None:
            create["previous_response_id"] = self._parent
        if self._instructions is not None:
            create["instructions"] = self._instructions
        self._send(create)
        cancelled = False
        while True:
            if stopped() and not cancelled:
                cancelled = True
                self._send({"type": "response.cancel"})
            event = self._receive()
            if event is None:
                continue
            if event["type"] == "response.output_text.delta":
                write(event["delta"])
            elif event["type"] == "error":
                if cancelled and event["error"]["code"] == "response_not_active":
                    continue
                raise ChatError(event["error"]["message"])
            elif event["type"] in TERMINAL_EVENTS:
                response: dict[str, Any] = event["response"]
                if response["status"] != "failed":
                    self._parent = response["id"]
                return response

    def _send(self, event: dict[str, Any]) -> None:
        self._connection.send(orjson.dumps(event), text=True)

    def _receive(self) -> dict[str, Any] | None:
        try:
            event: dict[str, Any] = orjson.loads(self._connection.recv(timeout=TICK_SECONDS))
        except TimeoutError:
            return None
        return event


def chat_in_terminal(url: str, *, api_key: str | None = None, instructions: str | None = None) -> None:
    """Read lines and show answers until the input ends. Raises `ChatError`."""
    console = Console(highlight=False)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with connect(socket_url(url), additional_headers=headers, max_size=None) as connection:
            console.print(f"[dim]{HELP}[/]")
            _converse(Chat(connection, instructions), console)
    except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as exc:
        raise ChatError(f"cannot connect to {url}: {exc}") from None
    except ConnectionClosed as exc:
        raise ChatError(f"the server closed the connection: {exc}") from None


def _converse(chat: Chat, console: Console) -> None:
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/quit":
            return
        if line == "/new":
            chat.forget()
            console.print("[dim]A new conversation.[/]")
        elif line == "/help":
            console.print(f"[dim]{HELP}[/]")
        elif line:
            _turn(chat, line, console)


def _turn(chat: Chat, line: str, console: Console) -> None:
    started = time.perf_counter()
    with _stop_on_interrupt() as stopped:
        try:
            response = chat.ask(line, _write, stopped)
        except ChatError as exc:
            console.print(f"\n[red]{str(exc).replace('[', chr(92) + '[')}[/]")
            return
    console.print(f"\n[dim]{summary(response, time.perf_counter() - started)}[/]")


def summary(response: dict[str, Any], seconds: float) -> str:
    """What a turn cost, in one line."""
    if response["status"] == "failed":
        return f"failed: {response['error']['message']}"
    usage = response["usage"]
    reused = usage["input_tokens_details"]["cached_tokens"]
    ending = "" if response["status"] == "completed" else f", {response['status']}"
    return (
        f"{usage['input_tokens'] - reused} new tokens read, {reused} reused, "
        f"{usage['output_tokens']} written in {seconds:.1f} s{ending}"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is noted, a second one interrupts as usual."""
    interrupts = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupts > 0
    finally:
        signal.signal(signal.SIGINT, before)
