"""Answers given lately, so that a client which sends its whole history back meets the very ids it was sent.

Text that goes out and comes back would be encoded anew, and a model's own choice of tokens is often not the
one an encoder makes: from the first such place on nothing cached would fit. So an assistant message is looked
up by what came before it and what it says.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from sessions import tokens
from sessions.lru import BoundedMap

MAX_REPLIES = 4096
REPLY_TTL_S = 24 * 3600.0


class PrefixDigest:
    """A digest of a growing list of token ids."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        self._hash.update(tokens.to_bytes(tokens.ids(ids)))

    def value(self) -> bytes:
        return self._hash.digest()


class ReplyMemo:
    """Which ids an owner's prompt was answered with, by the answer's text. Bounded, and only in memory."""

    def __init__(self, limit: int = MAX_REPLIES) -> None:
        self._replies: BoundedMap[tuple[str, bytes, bytes], array[int]] = BoundedMap(limit, ttl_s=REPLY_TTL_S)

    def remember(self, owner: str, prompt: PrefixDigest, text: str, ids: array[int]) -> None:
        if ids:
            self._replies.put(_key(owner, prompt, text), ids)

    def find(self, owner: str, prompt: PrefixDigest, text: str) -> array[int] | None:
        return self._replies.get(_key(owner, prompt, text))


def _key(owner: str, prompt: PrefixDigest, text: str) -> tuple[str, bytes, bytes]:
    # Clients like to trim what they keep.
    said = hashlib.blake2b(text.strip().encode("utf-8", "replace"), digest_size=16).digest()
    return owner, prompt.value(), said
