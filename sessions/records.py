"""How turns, conversations and log entries are written down in the store: msgpack, ids as packed integers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgpack

from sessions import tokens
from sessions.eventlog import DeltaRun, Entry, Single
from sessions.prompt import Segment
from sessions.store import ConversationRecord, TurnRecord
from sessions.tokenizer import Message


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def pack_head(turn: TurnRecord) -> bytes:
    """What never changes."""
    return pack(
        {
            "generate": turn.generate,
            "branch": turn.branch,
            "instructions": turn.instructions,
            "input": turn.input,
            "messages": [(message.role, message.content) for message in turn.messages],
            "ids": tokens.to_bytes(turn.segment.ids),
            "settled": (
                None if turn.segment.settled == turn.segment.ids else tokens.to_bytes(turn.segment.settled)
            ),
        }
    )


def pack_tail(turn: TurnRecord) -> bytes:
    """What the end of the turn brings."""
    return pack(
        {
            "response": turn.response,
            "output_ids": tokens.to_bytes(turn.output_ids),
            "last_number": turn.last_number,
        }
    )


def turn_of(row: Sequence[bytes]) -> TurnRecord:
    response_id, owner, parent, conversation, deleted, orphaned, packed_head, packed_tail = row
    head, tail = msgpack.unpackb(packed_head), msgpack.unpackb(packed_tail)
    ids: array[int] = tokens.from_bytes(head["ids"])
    settled = ids if head["settled"] is None else tokens.from_bytes(head["settled"])
    return TurnRecord(
        id=response_id.decode(),
        owner=owner.decode(),
        parent_id=parent.decode() or None,
        conversation_id=conversation.decode() or None,
        generate=head["generate"],
        branch=head["branch"],
        instructions=head["instructions"],
        input=head["input"],
        messages=[Message(role, content) for role, content in head["messages"]],
        segment=Segment(ids, settled),
        output_ids=tokens.from_bytes(tail["output_ids"]),
        response=tail["response"],
        last_number=tail["last_number"],
        orphaned=orphaned == b"1",
        deleted=deleted != b"",
    )


def conversation_of(row: Sequence[bytes]) -> ConversationRecord:
    conversation_id, owner, created, updated, rev, leaf, active, metadata = row
    return ConversationRecord(
        id=conversation_id.decode(),
        owner=owner.decode(),
        created_ms=int(created),
        updated_ms=int(updated),
        rev=int(rev),
        leaf=leaf.decode() or None,
        active=active.decode() or None,
        metadata=msgpack.unpackb(metadata),
    )


def pack_entry(entry: Entry) -> bytes:
    if isinstance(entry, DeltaRun):
        return pack([entry.first, entry.shape, entry.pieces])
    return pack([entry.event])


def unpack_entry(packed: bytes) -> Entry:
    fields = msgpack.unpackb(packed)
    return Single(fields[0]) if len(fields) == 1 else DeltaRun(*fields)
