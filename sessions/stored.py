"""A turn that this process is not writing: finished long ago, or being written by another process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from sessions.api import Event, SessionError
from sessions.eventlog import DELTA, Entry, EventLog
from sessions.response import Response
from sessions.store import Store, TurnRecord
from sessions.turn import TERMINAL_EVENTS, TurnWriter

POLL_S = 0.2
LOST_EVENTS = 100_000
"""More events than a process that dies can have shown without logging them. The end of its turn is numbered
beyond them all, so that whoever has seen them gets it too.
"""


class StoredTurn:
    """Like a live turn from outside: events come from the log, the end comes from the stored response."""

    def __init__(self, store: Store, record: TurnRecord) -> None:
        self.response_id = record.id
        self.conversation_id = record.conversation_id
        self._store = store
        self._record = record

    @property
    def response(self) -> Response:
        """The response object as it was read."""
        return self._record.response

    @property
    def in_progress(self) -> bool:
        return self._record.in_progress

    async def events(self, starting_after: int = -1) -> AsyncGenerator[Event, None]:
        """Every event numbered above `starting_after`.

        When the log of a finished turn is gone its events are told again from the response, from the start to
        a viewer that has seen none; any other gets the terminal event, which carries the whole answer. Raises
        `SessionError` `not_resumable` when the turn still runs elsewhere and its log does not reach back that
        far.
        """
        log = EventLog()
        position = starting_after
        while True:
            # The record before the log: a turn that is over by then has its last entries under way at worst.
            running = self._record.in_progress
            entries = await self._store.read_log(self.response_id, position)
            if not running:
                break
            if entries is None:
                raise SessionError(
                    "The response is still being written and its earlier events are gone; wait for its end.",
                    code="not_resumable",
                    status=409,
                    param="starting_after",
                )
            log.extend(entries)
            for event in log.read(position):
                position = event["sequence_number"]
                yield event
            await asyncio.sleep(POLL_S)
            await self._refresh()
        for event in _rest(self._record, position, entries):
            yield event

    async def cancel(self) -> None:
        """Ask the process that writes it to stop."""
        if self._record.in_progress:
            await self._store.request_cancel(self.response_id)

    async def result(self) -> Response:
        """The finished response."""
        while self._record.in_progress:
            await asyncio.sleep(POLL_S)
            await self._refresh()
        return self._record.response

    async def _refresh(self) -> None:
        record = await self._store.turn(self.response_id)
        if record is None or record.deleted:
            raise SessionError("The response was deleted.", code="response_not_found", status=404)
        if record.orphaned:
            record = await settle_orphan(self._store, record)
        self._record = record


def _rest(record: TurnRecord, after: int, entries: list[Entry] | None) -> list[Event]:
    """What is left of a finished turn, from its log if that is whole, else from its response."""
    logged = EventLog(entries or [])
    if entries and entries[0].first <= after + 1 and logged.last == record.last_number:
        return logged.read(after)
    # Where a viewer stood in the text is not known any more; the terminal event carries all of it.
    told = _retold(record) if after < 0 else [_terminal(record)]
    return [event for event in told if event["sequence_number"] > after]


def _retold(record: TurnRecord) -> list[Event]:
    """The events of a finished turn with its text in one delta. The last ones have the numbers they had."""
    unfinished: dict[str, Any] = {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    unfinished |= {"error": None, "incomplete_details": None}
    writer = TurnWriter({**record.response, **unfinished})
    writer.created()
    if record.generate:
        writer.in_progress()
    if not record.response["output"]:
        return [*writer.log.read(-1), _terminal(record)]
    item = record.response["output"][0]
    writer.message_id = item["id"]
    writer.text(item["content"][0]["text"])
    writer.response = record.response
    closing_from = writer.log.last + 1
    writer.emit()
    events = writer.log.read(-1)
    shift = record.last_number - writer.log.last
    # The delta stands for all the original ones, so it has the number of the last of them.
    return [
        {**event, "sequence_number": event["sequence_number"] + shift}
        if event["sequence_number"] >= closing_from or event["type"] == DELTA
        else event
        for event in events
    ]


def _terminal(record: TurnRecord) -> Event:
    kind = TERMINAL_EVENTS[record.response["status"]]
    return {"type": kind, "response": record.response, "sequence_number": record.last_number}


async def settle_orphan(store: Store, record: TurnRecord) -> TurnRecord:
    """End a turn whose process is gone: it failed, and what the log kept of its text is shown with it."""
    logged = EventLog(await store.read_log(record.id, -1) or [])
    writer = TurnWriter(record.response)
    for event in logged.read(-1):
        if event["type"] == "response.output_item.added":
            writer.message_id = event["item"]["id"]
            writer.reopen()
    number = logged.last
    record.response = writer.finish(
        "failed",
        completed_at=int(time.time()),
        text=logged.text,
        usage=None,
        error={"code": "server_error", "message": "The server stopped while this answer was being written."},
    )
    record.last_number = number + LOST_EVENTS + (4 if writer.opened else 1)
    record.orphaned = False
    if await store.interrupt_turn(record):
        return record
    return await store.turn(record.id) or record
