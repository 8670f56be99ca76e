"""Writes the events of one response in the protocol's order, and keeps the response object in step."""

from __future__ import annotations

import copy
from typing import Any

from sessions.api import Event
from sessions.eventlog import DELTA, EventLog
from sessions.ids import new_id
from sessions.response import (
    ItemStatus,
    Response,
    ResponseStatus,
    output_message,
    text_part,
)

TERMINAL_EVENTS: dict[ResponseStatus, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    # Clients know three endings; an answer that was cancelled is an incomplete one whose status says why.
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class TurnWriter:
    """created, [queued,] in_progress…, the item with its deltas, one terminal event. Ids never change."""

    def __init__(self, response: Response) -> None:
        self.response = response
        self.log = EventLog()
        self.message_id = new_id("msg")
        self._opened = False

    @property
    def opened(self) -> bool:
        """Whether the output item has begun."""
        return self._opened

    @property
    def status(self) -> ResponseStatus:
        status: ResponseStatus = self.response["status"]
        return status

    def reopen(self) -> None:
        """The output item has begun in another life of this response."""
        self._opened = True

    def created(self) -> None:
        self._announce("response.created")

    def queued(self) -> None:
        self._announce("response.queued")

    def in_progress(self) -> None:
        self.response["status"] = "in_progress"
        self._announce("response.in_progress")

    def still_waiting(self) -> None:
        """Say again where the turn is, until its output item begins: clients count frames, not pings."""
        if not self._opened and self.status in ("queued", "in_progress"):
            self._announce(f"response.{self.status}")

    def text(self, piece: str) -> None:
        """Add text to the answer, which begins with the first call; an empty piece only begins it."""
        if not self._opened:
            self._opened = True
            item = output_message(self.message_id, None, "in_progress")
            self.log.append({"type": "response.output_item.added", "output_index": 0, "item": item})
            self._part_event("response.content_part.added", part=text_part(""))
        if piece:
            self.log.append_delta(self._place(DELTA) | {"logprobs": []}, piece)

    def finish(
        self,
        status: ResponseStatus,
        *,
        completed_at: int,
        text: str,
        usage: dict[str, Any] | None,
        incomplete_reason: str | None = None,
        error: dict[str, Any] | None = None,
    ) -> Response:
        """The response as it will be stored. `emit` then shows it."""
        response = self.response
        response["status"] = status
        response["completed_at"] = completed_at
        response["usage"] = usage
        response["incomplete_details"] = {"reason": incomplete_reason} if incomplete_reason else None
        response["error"] = error
        if self._opened:
            response["output"] = [output_message(self.message_id, text, self._item_status())]
        return response

    def terminal_number(self) -> int:
        """The number the terminal event will have."""
        return self.log.last + (4 if self._opened else 1)

    def emit(self) -> None:
        """Close the item and send the terminal event. Nothing follows it."""
        if self._opened:
            item = self.response["output"][0]
            text = item["content"][0]["text"]
            self._part_event("response.output_text.done", text=text, logprobs=[])
            self._part_event("response.content_part.done", part=text_part(text))
            self.log.append({"type": "response.output_item.done", "output_index": 0, "item": item})
        self._announce(TERMINAL_EVENTS[self.status])
        self.log.close()

    def _item_status(self) -> ItemStatus:
        return "completed" if self.status == "completed" else "incomplete"

    def _place(self, kind: str) -> Event:
        return {"type": kind, "item_id": self.message_id, "output_index": 0, "content_index": 0}

    def _part_event(self, kind: str, **fields: Any) -> None:
        self.log.append(self._place(kind) | fields)

    def _announce(self, kind: str) -> None:
        # An event shows the response as it was then; the object itself goes on changing.
        self.log.append({"type": kind, "response": copy.deepcopy(self.response)})
