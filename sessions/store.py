"""What sessions need of a store: turns, conversations, and the event log of a running turn.

Every mutation is atomic and may safely be sent twice. Nothing here waits for another process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from sessions.api import Item, SessionError
from sessions.eventlog import Entry
from sessions.prompt import Segment
from sessions.response import Response
from sessions.tokenizer import Message


class StoreUnavailable(SessionError):
    """The store does not answer. The same request may work in a moment."""

    def __init__(self, message: str = "The store of conversations cannot be reached.") -> None:
        super().__init__(message, code="store_unavailable", status=503, type="server_error")


@dataclass(slots=True)
class TurnRecord:
    """A turn as it is stored. `response`, `output_ids` and `last_number` are final once its status is.

    input: the items as they are listed.
    messages: the same for the template, with those of warm-ups before it.
    last_number: the number of its last event.
    orphaned: it is in progress and no other process writes it; unless this one does, nobody does.
    deleted: nobody may see or name it any more; it is kept because other turns go on from it.
    """

    id: str
    owner: str
    parent_id: str | None
    conversation_id: str | None
    generate: bool
    branch: str | None
    instructions: str | None
    input: list[Item]
    messages: list[Message]
    segment: Segment
    output_ids: array[int]
    response: Response
    last_number: int = -1
    orphaned: bool = False
    deleted: bool = False

    @property
    def in_progress(self) -> bool:
        return bool(self.response["status"] == "in_progress")


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """A named tree of turns. Times in milliseconds.

    leaf: the turn the next one goes on from.
    active: the turn that is being written.
    rev: grows with every change.
    """

    id: str
    owner: str
    created_ms: int
    updated_ms: int
    rev: int
    leaf: str | None = None
    active: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeginOutcome:
    """How `begin_turn` went. `response_id` is the turn meant by duplicate and busy.

    duplicate: the same client message began a turn before.
    busy: another process is writing in the conversation.
    moved: the conversation's leaf is not the parent any more.
    """

    kind: Literal["begun", "duplicate", "busy", "moved", "no_parent", "no_conversation"]
    response_id: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """How a change of a conversation went. `rev` is the current one, whether it was changed or not."""

    kind: Literal["updated", "conflict", "missing"]
    rev: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Some conversations, newest first."""

    conversations: list[ConversationRecord]
    has_more: bool


class Store(Protocol):
    async def start(self) -> None:
        """Connect, or raise `RuntimeError` saying what is wrong."""
        ...

    async def close(self) -> None: ...

    async def begin_turn(self, turn: TurnRecord, *, client_msg_id: str | None = None) -> BeginOutcome:
        """Store a turn in progress; it becomes its conversation's active one."""
        ...

    async def finish_turn(self, turn: TurnRecord, *, advance: bool) -> bool:
        """Store the end of a turn, which becomes the leaf if `advance`. False: it was deleted meanwhile."""
        ...

    async def interrupt_turn(self, turn: TurnRecord) -> bool:
        """Store the end of an orphaned turn, unless somebody else has done so."""
        ...

    async def turn(self, response_id: str) -> TurnRecord | None: ...

    async def chain(self, response_id: str) -> list[TurnRecord]:
        """The turn and all above it, the first one first; empty if it is not there. Puts off their expiry."""
        ...

    async def delete_turn(self, owner: str, response_id: str) -> bool: ...

    async def request_cancel(self, response_id: str) -> None:
        """Ask whichever process writes the turn to stop."""
        ...

    async def append_log(self, response_id: str, entries: Sequence[Entry]) -> bool:
        """Add events to the log. Returns whether somebody has asked to cancel the turn."""
        ...

    async def read_log(self, response_id: str, after: int) -> list[Entry] | None:
        """The events beyond number `after`; None if the log does not reach back that far any more."""
        ...

    async def create_conversation(self, owner: str, metadata: dict[str, str]) -> ConversationRecord: ...

    async def conversation(self, conversation_id: str) -> ConversationRecord | None: ...

    async def conversations(self, owner: str, *, after: str | None, limit: int) -> Page: ...

    async def update_conversation(
        self, owner: str, conversation_id: str, metadata: dict[str, str], *, rev: int | None
    ) -> UpdateOutcome: ...

    async def delete_conversation(self, owner: str, conversation_id: str) -> list[str] | None:
        """Delete it with its turns. Returns the turns' ids, None if there is no such conversation."""
        ...
