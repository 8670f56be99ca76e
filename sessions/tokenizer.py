"""A chat tokenizer: messages to template text, template text to token ids.

Control tokens that a person types never become control tokens. The person's copies are marked before the
template is rendered and encoded as the letters they are; what the template itself writes keeps its meaning.
transformers can do this too (`sanitize_control_tokens`, from 5.24 on, for special tokens and those the
template writes). Here every added token counts, the mark doubles as the place holder of replies, and every
supported version behaves alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from engine.detokenizer import TextStream
from sessions.api import SessionError

# Unicode sets these code points aside for a program's own use; they mean nothing in text and are dropped from
# it.
_TYPED, _TYPED_END, _REPLY = "\ufdd0", "\ufdd1", "\ufdd2"
_OWN_MARKS = str.maketrans("", "", _TYPED + _TYPED_END + _REPLY)

ROLES = ("user", "assistant", "system")
LONG_TEXT = 4096
"""Characters above which encoding takes long enough to be felt by others."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the template sees it. role: user, assistant or system."""

    role: str
    content: str


REPLY = Message("assistant", _REPLY)
"""Stands for an answer whose ids are known: the rendered text is cut where it is."""


class ChatTokenizer:
    """Wraps a transformers tokenizer that has a `tokenizers` backend and a chat template.

    Raises `ValueError` when it has no fast backend or no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
            raise ValueError("the model's tokenizer has no `tokenizers` backend, which streaming needs")
        if not tokenizer.chat_template:
            raise ValueError("the model has no chat template: choose an instruction-tuned model")
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        # Runs of spaces and newlines are added tokens in some vocabularies; they are ordinary text.
        self._control_ids = {text: id_ for text, id_ in added.items() if text and not text.isspace()}
        self._control = re.compile(
            "|".join(re.escape(text) for text in sorted(self._control_ids, key=len, reverse=True)) or "(?!)"
        )
        # A template that cuts strings may part the two marks of a token; a lone mark still parts its
        # neighbours.
        self._marked = re.compile(f"{_TYPED}({self._control.pattern}){_TYPED_END}|[{_TYPED}{_TYPED_END}]")
        self.longest_token = max(map(len, self._backend.get_vocab()))
        """Characters of the longest token: no text has fewer tokens than its length divided by this."""
        self._newline = self._ids("\n")
        # SentencePiece puts a space before the first word of every text it encodes; a piece from the middle
        # of a text must do without.
        self._invents_space = self._ids("\na") != self._newline + self._ids("a")

    @property
    def control_tokens(self) -> dict[str, int]:
        """The texts that stand for control tokens, and their ids."""
        return dict(self._control_ids)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> list[str]:
        """The conversation as template text, cut at every `REPLY`: one piece more than there are replies.

        The pieces are for `encode` only: what people typed is marked in them. Raises `SessionError` when the
        template refuses the messages (an unknown order of roles, say) in its own words.
        """
        conversation = [
            {"role": m.role, "content": _REPLY if m is REPLY else self._mark(m.content)} for m in messages
        ]
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generation_prompt
            )
        except (TemplateError, TypeError, ValueError, IndexError, KeyError) as exc:
            raise SessionError(
                f"input cannot be rendered by the model's chat template: {exc}",
                param="input",
                code="invalid_prompt",
            ) from exc
        return text.split(_REPLY)

    def encode(self, text: str, *, continues: bool) -> list[int]:
        """Token ids of template text from `render`. continues: other text comes before it."""
        ids: list[int] = []
        for index, piece in enumerate(self._marked.split(text)):
            if not piece:
                continue
            if index % 2:
                ids += self._encode_typed(piece)
            else:
                found = self._piece(piece) if continues or ids else self._ids(piece)
                self._refuse_smuggled(piece, found)
                ids += found
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text from a person, as it stands in the middle of a conversation."""
        return self.encode(self._mark(text), continues=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer; control tokens leave nothing behind."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self, stop: Iterable[str] = ()) -> TextStream:
        """A decoder for one answer."""
        return TextStream(self._backend, tuple(stop))

    def _mark(self, text: str) -> str:
        return self._control.sub(f"{_TYPED}\\g<0>{_TYPED_END}", text.translate(_OWN_MARKS))

    def _encode_typed(self, token: str) -> list[int]:
        # In two halves no tokenizer recognises the whole.
        return self._piece(token[:1]) + (self._piece(token[1:]) if len(token) > 1 else [])

    def _piece(self, text: str) -> list[int]:
        """Ids of text from the middle of a conversation."""
        if self._invents_space:
            ids = self._ids("\n" + text)
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return ids
        # Only the batch calls let other threads run meanwhile, the event loop's among them.
        long_ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return long_ids

    def _refuse_smuggled(self, piece: str, ids: list[int]) -> None:
        """A normaliser may make control tokens of look-alike letters: more than the template wrote."""
        control = set(self._control_ids.values())
        if sum(token in control for token in ids) > len(self._control.findall(piece)):
            raise SessionError(
                "input contains letters that this model's tokenizer turns into control tokens",
                param="input",
                code="invalid_prompt",
            )
