"""What waits to be written to one connection: bounded in bytes, with text deltas merged while they wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sessions.api import Event

DELTA_OVERHEAD = 256
"""Bytes a delta event takes beside its text, roughly; enough for a bound."""

MERGEABLE = frozenset({"response.output_text.delta"})


class OutboxFull(Exception):
    """Answers to control frames pile up because the client sends them without reading."""


@dataclass(frozen=True, slots=True)
class Close:
    """The last thing in an outbox: close the socket with this code."""

    code: int
    reason: str


@dataclass(slots=True)
class _Delta:
    """A delta that can still grow. Its sequence number is that of the newest text in it."""

    event: Event
    pieces: list[str]
    source: object

    def accepts(self, event: Event) -> bool:
        """Whether the event's text continues this one's: same part of the same item."""
        return all(
            event.get(name) == self.event.get(name)
            for name in ("type", "item_id", "output_index", "content_index", "stream_id")
        )

    def merge(self, event: Event) -> None:
        self.pieces.append(event["delta"])
        self.event = {**self.event, "sequence_number": event["sequence_number"]}

    def whole(self) -> Event:
        return {**self.event, "delta": "".join(self.pieces)}


class Outbox:
    """A queue between the tasks that produce events and the one task that writes them.

    `put` waits while more than `limit` bytes wait, so a slow reader holds back its own producers and nobody
    else. A text delta joins the one that waits already when nothing of the same source came between, so a
    reader that is behind gets fewer, larger frames: what waits grows with the answer, not with its tokens.
    """

    def __init__(self, limit: int, encode: Callable[[Event], bytes]) -> None:
        self._limit = limit
        self._encode = encode
        self._entries: deque[tuple[bytes | _Delta | Close, int]] = deque()
        self._growing: dict[object, _Delta] = {}
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self.size = 0

    async def put(self, event: Event, source: object) -> None:
        """Queue an event of one stream of events; returns at once unless the outbox is full."""
        await self._room.wait()
        if self._closed:
            return
        if event["type"] in MERGEABLE:
            growing = self._growing.get(source)
            if growing is not None and growing.accepts(event):
                growing.merge(event)
                self._grow(len(event["delta"]))
                return
            delta = _Delta(event, [event["delta"]], source)
            self._growing[source] = delta
            self._append(delta, DELTA_OVERHEAD + len(event["delta"]))
            return
        self._growing.pop(source, None)
        encoded = self._encode(event)
        self._append(encoded, len(encoded))

    def put_now(self, event: Event) -> None:
        """Queue an answer to a control frame without waiting. Raises `OutboxFull` at twice the limit."""
        if self._closed:
            return
        if self.size >= 2 * self._limit:
            raise OutboxFull
        encoded = self._encode(event)
        self._append(encoded, len(encoded))

    def close(self, code: int, reason: str) -> None:
        """Let the writer send what waits and then close. Later events are dropped."""
        if not self._closed:
            self._closed = True
            self._append(Close(code, reason), 0)
            self._room.set()

    async def take(self) -> bytes | Close:
        """The next frame. It stops growing the moment it is taken."""
        while not self._entries:
            self._filled.clear()
            await self._filled.wait()
        entry, size = self._entries.popleft()
        if isinstance(entry, _Delta):
            if self._growing.get(entry.source) is entry:
                del self._growing[entry.source]
            encoded = self._encode(entry.whole())
            size = DELTA_OVERHEAD + sum(map(len, entry.pieces))
        self._grow(-size)
        if isinstance(entry, _Delta):
            return encoded
        return entry

    def __len__(self) -> int:
        return len(self._entries)

    def _append(self, entry: bytes | _Delta | Close, size: int) -> None:
        self._entries.append((entry, size))
        self._grow(size)
        self._filled.set()

    def _grow(self, size: int) -> None:
        self.size += size
        if self.size < self._limit or self._closed:
            self._room.set()
        else:
            self._room.clear()
