"""Text of a growing answer: token ids in, text out that is safe to show at once.

Three promises hold whatever the ids are:
* the pieces joined equal the one-shot decode of the same ids, cut where a stop string begins;
* nothing that was given out is ever taken back: the emitted offset never decreases;
* what is withheld is exactly the unfinished character and the longest tail that may become a stop string.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes one answer as its ids arrive.

    tokenizer: a `tokenizers.Tokenizer`, or a transformers tokenizer that has one inside.
    stop: strings that end the answer. The one that is complete first ends it; it is not part of the text.
    skip_special_tokens: control tokens leave no text behind.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._silent: list[int] = []  # the newest ids, which have brought no text yet
        self._decoded = 0  # characters decoded so far, withheld ones included
        self._decoded_after = array("Q")  # the same, after each token
        self._pieces: list[str] = []
        self._withheld = ""
        self._finished = False
        self.stopped = False
        """True once a stop string has ended the answer; later tokens are ignored."""

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def kept_tokens(self) -> int:
        """How many of the pushed tokens belong to the answer.

        All of them, unless a stop string ended it: then up to the token that brought the last kept character
        (a token that carries both answer and stop string is kept, so that no shown text is missing from it).
        """
        if not self.stopped:
            return len(self._ids)
        end = len(self.text)
        return bisect_left(self._decoded_after, end) + 1 if end else 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is safe to show now, perhaps none."""
        if self._finished:
            raise RuntimeError("push() after finish()")
        if self.stopped:
            return ""
        fresh: list[str] = []
        for token_id in token_ids:
            self._ids.append(token_id)
            piece = self._decode(token_id)
            if piece:
                fresh.append(piece)
                self._decoded += len(piece)
            self._decoded_after.append(self._decoded)
        return self._release("".join(fresh))

    def finish(self) -> str:
        """The answer is over: return what was withheld. An unfinished character shows as U+FFFD."""
        if self._finished:
            return ""
        self._finished = True
        if self.stopped:
            return ""
        # The rest goes the way of every other piece, so a stop string completed by it still ends the answer.
        tail = self._unfinished_tail()
        if tail:
            self._decoded += len(tail)
            self._decoded_after[-1] = self._decoded
        shown = self._release(tail)
        if not self.stopped:
            self._pieces.append(self._withheld)
            shown += self._withheld
        self._withheld = ""
        return shown

    def _decode(self, token_id: int) -> str:
        self._silent.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library raises nothing narrower
            # Broken UTF-8 in a run of byte tokens: the one-shot decode would rewrite characters that were
            # shown already. They stay; what came since is decoded on its own.
            piece = self._one_shot(self._silent)
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
        if piece:
            self._silent.clear()
        return piece or ""

    def _unfinished_tail(self) -> str:
        tail = self._one_shot(self._silent) if self._silent else ""
        if not tail:
            return ""
        whole, shown = self._one_shot(self._ids), self.text + self._withheld
        return whole[len(shown) :] if whole.startswith(shown) else tail

    def _one_shot(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _release(self, fresh: str) -> str:
        """Split what is pending into text to give out now and text to withhold."""
        pending = self._withheld + fresh
        end = self._first_stop(pending) if fresh else None
        if end is not None:
            self.stopped = True
            shown, self._withheld = pending[:end], ""
        else:
            keep = self._possible_stop(pending)
            shown, self._withheld = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self._pieces.append(shown)
        return shown

    def _first_stop(self, pending: str) -> int | None:
        """Where the stop string that is complete first begins; of two ending together, the longer one."""
        found = [(start + len(stop), start) for stop in self._stop if (start := pending.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_stop(self, pending: str) -> int:
        """Length of the longest tail that is the beginning of some stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest
