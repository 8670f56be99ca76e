"""From a parent and new messages to the exact prompt."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sessions import tokens
from sessions.api import SessionError
from sessions.items import with_instructions
from sessions.lru import BoundedMap
from sessions.memo import PrefixDigest, ReplyMemo
from sessions.prompt import PromptBuilder, Segment
from sessions.tokenizer import Message
from sessions.tree import TurnNode

LONG_TEXT = 8_000
"""Characters from which on encoding is given to a thread: it would hold up everybody's stream."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt, and what of it belongs to the new turn.

    messages: what the turn adds since the last answer. history: the ids before `segment`.
    """

    messages: list[Message]
    segment: Segment
    history: array[int]

    def prompt_ids(self) -> list[int]:
        return (self.history + self.segment.ids).tolist()

    def settled_prompt(self) -> array[int]:
        """The prompt as later turns will have it before this turn's answer."""
        return self.history + self.segment.settled


class Planner:
    """Builds prompts and remembers answers, so that histories which are sent back find their own ids."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._memo = ReplyMemo()
        self._reframed: BoundedMap[tuple[str, str | None], Segment] = BoundedMap(256)

    async def plan(
        self,
        owner: str,
        parent: TurnNode | None,
        messages: Sequence[Message],
        instructions: str | None,
        *,
        answer: bool,
    ) -> Plan:
        """Raises `SessionError` when the template refuses the messages."""
        if parent is not None:
            messages = [*parent.pending, *messages]
        answered = parent.answered if parent is not None else None
        size = sum(len(message.content) for message in messages)
        if answered is None:
            segment = await _off_loop_if_long(
                size, lambda: self._first(owner, messages, instructions, answer=answer)
            )
            return Plan(list(messages), segment, tokens.ids())
        history = await self._history(answered, instructions)
        segment = await _off_loop_if_long(size, lambda: self._builder.next(messages, answer=answer))
        return Plan(list(messages), segment, history)

    def remember(self, owner: str, plan: Plan, text: str, output_ids: array[int]) -> None:
        """An answer was given: whoever sends it back as text means these ids."""
        self._memo.remember(owner, PrefixDigest(plan.settled_prompt()), text, output_ids)

    def _first(
        self, owner: str, messages: Sequence[Message], instructions: str | None, *, answer: bool
    ) -> Segment:
        framed = with_instructions(instructions, messages)
        try:
            return self._builder.first(
                framed, answer=answer, known=lambda digest, text: self._memo.find(owner, digest, text)
            )
        except SessionError:
            if framed or answer:
                raise
            # A warm-up with nothing in it; some templates need at least one message.
            return Segment(tokens.ids(), tokens.ids())

    async def _history(self, parent: TurnNode, instructions: str | None) -> array[int]:
        """The ids of all turns up to and with the parent's answer, under the given instructions."""
        ids = tokens.ids()
        for index, node in enumerate(parent.path()):
            segment = node.segment
            if index == 0 and node.instructions != instructions:
                segment = await self._reframe(node, instructions)
            ids += segment.settled
            ids += node.output_ids
        return ids

    async def _reframe(self, node: TurnNode, instructions: str | None) -> Segment:
        """A first turn under other instructions. Only what was sent is encoded again, never an answer."""
        known = self._reframed.get((node.id, instructions))
        if known is None:
            size = sum(len(message.content) for message in node.messages)
            known = await _off_loop_if_long(
                size, lambda: self._first(node.owner, node.messages, instructions, answer=True)
            )
            self._reframed.put((node.id, instructions), known)
        return known


async def _off_loop_if_long(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()
