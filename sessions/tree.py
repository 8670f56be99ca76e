"""The tree of turns as it is in memory: every node knows its parent, and with it its exact history."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sessions.prompt import Segment
from sessions.response import ResponseStatus
from sessions.tokenizer import Message


@dataclass(frozen=True, slots=True)
class TurnNode:
    """One turn. It is not changed once it is in the tree.

    scope: set for a turn that only one connection may name.
    messages: what was said since the last answer, without instructions.
    generate: False for a warm-up, which has no answer; its messages become part of the turn after it.
    output_ids: the answer as it was generated, without the token that ended it.
    branch: name of the engine's branch that ends here, until a later turn takes it further.
    """

    id: str
    owner: str
    parent: TurnNode | None
    messages: Sequence[Message]
    instructions: str | None
    segment: Segment
    output_ids: array[int]
    status: ResponseStatus
    generate: bool = True
    scope: str | None = None
    conversation_id: str | None = None
    branch: str | None = None

    @property
    def answered(self) -> TurnNode | None:
        """This node, or the nearest one above it that has an answer."""
        node: TurnNode | None = self
        while node is not None and not node.generate:
            node = node.parent
        return node

    @property
    def pending(self) -> Sequence[Message]:
        """What warm-ups have said and nothing has answered yet."""
        return () if self.generate else self.messages

    def path(self) -> list[TurnNode]:
        """The answered turns from the first one to this one."""
        nodes = []
        node = self.answered
        while node is not None:
            nodes.append(node)
            node = node.parent.answered if node.parent is not None else None
        nodes.reverse()
        return nodes
