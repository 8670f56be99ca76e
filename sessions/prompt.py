"""Prompts are grown, not rendered again.

The template is rendered for what is new: the first turn as a whole, every later one only from the end of the
answer before it to the next place where an answer is due. What was generated is used as it was generated, so
its KV fits. This needs a template that only ever appends, which is proven for the loaded one before it is
used.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sessions import tokens
from sessions.api import SessionError
from sessions.memo import PrefixDigest
from sessions.tokenizer import REPLY, ChatTokenizer, Message

log = logging.getLogger(__name__)

_ASKED_BEFORE = Message("user", "Hello.")
"""Stands for the turn that a delta continues: templates look at the order of roles, not at what was said."""

KnownReply = Callable[[PrefixDigest, str], "array[int] | None"]
"""The ids of an answer that was generated after this prefix and reads like this, if there was one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The ids of one turn's own text: from the end of the answer before it to the start of its own.

    ids: as it stands while the answer is being written; it ends with the template's generation prompt.
    settled: as it stands in the history of later turns. The same ids, unless the template does not extend.
    """

    ids: array[int]
    settled: array[int]


@dataclass(frozen=True, slots=True)
class TemplateProof:
    """What was found out about a chat template.

    extends: turn n with its answer is a token prefix of turn n + 1, and growing gives the rendered ids.
    recomputed: tokens of a short sample turn that every next turn computes again; 0 if the template extends.
    closing: the token that the template puts after an answer, None if it puts none.
    reason: what did not fit, for the log.
    """

    extends: bool
    recomputed: int = 0
    closing: int | None = None
    reason: str = ""


class PromptBuilder:
    """Turns messages into segments. Raises `ValueError` for a template that cannot render a plain chat."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.proof = _prove(self)
        if not self.proof.extends:
            log.warning(
                "the chat template rewrites earlier turns (%s): about %d tokens and each answer"
                " are computed again in the turn after",
                self.proof.reason,
                self.proof.recomputed,
            )

    def first(
        self, messages: Sequence[Message], *, answer: bool = True, known: KnownReply | None = None
    ) -> Segment:
        """The segment of a conversation's first turn.

        answer: False leaves the generation prompt out (a warm-up).
        known: gives the exact ids of answers among the messages.
        """
        ids = self._first(messages, answer, known)
        if not answer or self.proof.extends:
            return Segment(ids, ids)
        rendered = self._tokenizer.render([*messages, REPLY, _ASKED_BEFORE], generation_prompt=False)
        return Segment(ids, self._encode(rendered, 0))

    def next(self, messages: Sequence[Message], *, answer: bool = True) -> Segment:
        """The segment of a turn that follows an answer. It begins with whatever closes that answer."""
        ids = self._next(messages, answer)
        if not answer or self.proof.extends:
            return Segment(ids, ids)
        before = (_ASKED_BEFORE, REPLY)
        rendered = self._tokenizer.render([*before, *messages, REPLY, _ASKED_BEFORE], generation_prompt=False)
        return Segment(ids, self._encode(rendered, 1))

    def _first(self, messages: Sequence[Message], answer: bool, known: KnownReply | None) -> array[int]:
        answers = [m.content for m in messages if m.role == "assistant"]
        if not answers or known is None:
            return self._encode(self._tokenizer.render(messages, generation_prompt=answer), 0)
        cut = [REPLY if m.role == "assistant" else m for m in messages]
        pieces = self._tokenizer.render(cut, generation_prompt=answer)
        if len(pieces) != len(answers) + 1:
            return self._encode(self._tokenizer.render(messages, generation_prompt=answer), 0)
        ids = self._encode(pieces, 0)
        digest = PrefixDigest(ids)
        for index, text in enumerate(answers, start=1):
            reply = known(digest, text)
            grown = tokens.ids(self._tokenizer.encode_text(text)) if reply is None else reply[:]
            grown += self._encode(pieces, index)
            digest.extend(grown)
            ids += grown
        return ids

    def _next(self, messages: Sequence[Message], answer: bool) -> array[int]:
        rendered = self._tokenizer.render([_ASKED_BEFORE, REPLY, *messages], generation_prompt=answer)
        return self._encode(rendered, 1)

    def _encode(self, pieces: Sequence[str], index: int) -> array[int]:
        if index >= len(pieces):
            raise SessionError(
                "the model's chat template leaves out earlier answers", code="invalid_prompt", param="input"
            )
        return tokens.ids(self._tokenizer.encode(pieces[index], continues=index > 0))


_SAMPLE = (
    ("What is the capital of France?", "Paris is the capital of France."),
    ("Thanks! And of Japan, in one word?", "Tokyo"),
    ("Write  two lines,\nplease.", "One line.\nAnother line."),
    ("Good bye", "Bye."),
)


def _prove(builder: PromptBuilder) -> TemplateProof:
    """Play a sample conversation both ways, with and without a system message, and compare ids."""
    proofs = []
    refusal = ""
    for system in ((Message("system", "Answer briefly."),), ()):
        try:
            proofs.append(_prove_sample(builder, system))
        except SessionError as exc:  # some templates know no system role
            refusal = exc.message
    if not proofs:
        raise ValueError(f"the chat template cannot render a plain conversation: {refusal}")
    return max(proofs, key=lambda proof: (not proof.extends, proof.recomputed))


def _prove_sample(builder: PromptBuilder, system: Sequence[Message]) -> TemplateProof:
    tokenizer = builder._tokenizer
    closing = builder._next([_ASKED_BEFORE], True)[:1]
    reason, recomputed = "", 0
    said = list(system)
    grown = array("I")
    for number, (question, answer) in enumerate(_SAMPLE):
        said.append(Message("user", question))
        whole = tokenizer.encode(tokenizer.render(said, generation_prompt=True)[0], continues=False)
        if whole[: len(grown)] != grown.tolist():
            reason = reason or f"turn {number} is no token prefix of turn {number + 1}"
        new = said if number == 0 else said[-1:]
        asked = builder._next(new, True) if number else builder._first(new, True, None)
        grown += asked
        if whole != grown.tolist():
            reason = reason or "rendered piece by piece it gives other tokens than as a whole"
        recomputed = max(recomputed, len(asked) - _common(asked, _settled(builder, new, first=number == 0)))
        grown += tokens.ids(tokenizer.encode_text(answer))
        said.append(Message("assistant", answer))
    return TemplateProof(
        extends=not reason,
        recomputed=recomputed if reason else 0,
        closing=closing[0] if closing else None,
        reason=reason,
    )


def _settled(builder: PromptBuilder, new: Sequence[Message], *, first: bool) -> array[int]:
    before = () if first else (_ASKED_BEFORE, REPLY)
    rendered = builder._tokenizer.render([*before, *new, REPLY, _ASKED_BEFORE], generation_prompt=False)
    return builder._encode(rendered, 0 if first else 1)


def _common(left: Iterable[int], right: Iterable[int]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
