"""The events of one response, numbered from 0, for any number of readers at any position.

Text deltas are most of the events. They are kept as one run of pieces, so a long answer costs little more
than its text, and a reader that is behind gets all that waits of it as one delta. A delta's number is that of
its last piece: a reader that goes on after it misses nothing and gets nothing twice.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from sessions.api import Event

DELTA = "response.output_text.delta"


@dataclass(slots=True)
class DeltaRun:
    """Consecutive text deltas of one content part. `shape` is the event without its number and text."""

    first: int
    shape: Event
    pieces: list[str] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.first + len(self.pieces) - 1

    def after(self, sequence_number: int) -> Event:
        """Everything beyond `sequence_number` as one event."""
        text = "".join(self.pieces[max(0, sequence_number + 1 - self.first) :])
        return {**self.shape, "delta": text, "sequence_number": self.last}


@dataclass(slots=True)
class Single:
    """Any other event. `first` and `last` are its number."""

    event: Event

    @property
    def first(self) -> int:
        number: int = self.event["sequence_number"]
        return number

    last = first

    def after(self, sequence_number: int) -> Event:
        return self.event


Entry = DeltaRun | Single


class EventLog:
    """An append-only list of events. `closed` once the last one is in."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: list[Entry] = []
        self._changed = asyncio.Event()
        self.closed = False
        self.extend(entries)

    @property
    def last(self) -> int:
        """Number of the newest event, -1 when there is none."""
        return self._entries[-1].last if self._entries else -1

    def append(self, event: Event) -> Event:
        """Number an event and add it. Returns it with its number."""
        numbered = {**event, "sequence_number": self.last + 1}
        self._entries.append(Single(numbered))
        self._wake()
        return numbered

    def append_delta(self, shape: Event, text: str) -> None:
        """Add a text delta; it joins the run before it when nothing came between."""
        entry = self._entries[-1] if self._entries else None
        if not isinstance(entry, DeltaRun) or entry.shape != shape:
            entry = DeltaRun(self.last + 1, shape)
            self._entries.append(entry)
        entry.pieces.append(text)
        self._wake()

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add entries that are numbered already and go on where this ends. What is here is skipped."""
        for entry in entries:
            if entry.last <= self.last:
                continue
            if isinstance(entry, DeltaRun):
                known = max(0, self.last + 1 - entry.first)
                before = self._entries[-1] if self._entries else None
                if isinstance(before, DeltaRun) and before.shape == entry.shape:
                    before.pieces += entry.pieces[known:]
                    continue
                entry = DeltaRun(entry.first + known, entry.shape, entry.pieces[known:])
            self._entries.append(entry)
        self._wake()

    @property
    def text(self) -> str:
        """All text in it."""
        return "".join("".join(entry.pieces) for entry in self._entries if isinstance(entry, DeltaRun))

    def close(self) -> None:
        self.closed = True
        self._wake()

    def read(self, after: int) -> list[Event]:
        """The events beyond number `after`, each run of deltas as one."""
        return [entry.after(after) for entry in self._beyond(after)]

    def entries(self, after: int) -> list[Entry]:
        """The same as entries that can be stored: a run is cut to the pieces beyond `after`."""
        found: list[Entry] = []
        for entry in self._beyond(after):
            if isinstance(entry, DeltaRun):
                skip = max(0, after + 1 - entry.first)
                entry = DeltaRun(entry.first + skip, entry.shape, entry.pieces[skip:])
            found.append(entry)
        return found

    async def wait(self, after: int) -> None:
        """Return when there is an event beyond `after`, or none will come."""
        while self.last <= after and not self.closed:
            await self._changed.wait()

    def _beyond(self, after: int) -> list[Entry]:
        return self._entries[bisect_right(self._entries, after, key=lambda entry: entry.last) :]

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
