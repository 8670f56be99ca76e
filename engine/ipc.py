"""Frames between the front and the engine process: a 4-byte big-endian length, then one msgpack map.

Every message is a map with a "type". From the front: `start` (settings), `submit`, `abort`, `release`,
`stats`.
From the engine: `progress`, `ready` or `failed` while it loads, then one `outputs` frame a step, `refused`
for a request that can never run, `stats`, and `fault` for a message it could not read. Nothing is ever
unpickled.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import msgpack

from engine.api import Output, PromptUsage

Message = dict[str, Any]

MAX_FRAME_BYTES = 64 * 2**20
"""A longer frame is taken for garbage: a prompt of a million ids is 5 MB."""

_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """The bytes are no frames; where the next frame starts cannot be known, so the connection is lost."""


def encode_frame(message: Message) -> bytes:
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into messages, whatever the sizes of the pieces it arrives in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises `FrameError` on anything that is no frame."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode_body(bytes(self._buffer[start + _LENGTH.size : end])))
            start = end
        del self._buffer[:start]
        return messages


def _decode_body(body: bytes) -> Message:
    try:
        message = msgpack.unpackb(body)
    except Exception as error:  # the unpacker raises many kinds, all of them mean the same here
        raise FrameError(f"a frame that is not msgpack ({type(error).__name__})") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise FrameError("a frame that is not a map with a type")
    return message


def pack_output(output: Output) -> list[Any]:
    """An output as a short list: there is one for every request in every step."""
    prompt = output.prompt
    counts = None if prompt is None else [prompt.total, prompt.reused, prompt.computed]
    return [output.request_id, output.token_ids, output.finish_reason, counts, output.error]


def unpack_output(values: list[Any]) -> Output:
    request_id, token_ids, finish_reason, counts, error = values
    return Output(
        request_id, token_ids, finish_reason, None if counts is None else PromptUsage(*counts), error
    )


class Channel:
    """The engine's end of the socket. Reading and writing never wait, unless they are asked to.

    A step must not stand still because the front is slow to read: what the socket does not take is kept and
    goes out with the next send.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._decoder = FrameDecoder()
        self._unsent = bytearray()
        self.closed = False

    def receive(self, *, wait: bool = False) -> list[Message]:
        """Messages that have arrived; with `wait`, sleep until there is at least something to do.

        Sets `closed` when the other side is gone. Raises `FrameError` on garbage.
        """
        messages: list[Message] = []
        if wait and not self.closed:
            self._sleep()
        while not self.closed:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if data:
                messages += self._decoder.feed(data)
            else:
                self.closed = True
        return messages

    def send(self, message: Message) -> None:
        self._unsent += encode_frame(message)
        self._push()

    def flush(self) -> None:
        """Wait until everything sent has left, or the other side is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._unsent and not self.closed:
            poll.poll()
            self._push()

    def _push(self) -> None:
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]

    def _sleep(self) -> None:
        """Sleep until something can be read; what is still unsent goes out meanwhile."""
        poll = select.poll()
        while not self.closed:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ((_, events),) = poll.poll()
            if events & select.POLLOUT:
                self._push()
            if events & ~select.POLLOUT:
                return

    def close(self) -> None:
        self.closed = True
        self._socket.close()
