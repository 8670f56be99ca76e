"""A bounded map: what is used least goes first, and what is old goes by itself."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedMap(Generic[K, V]):
    """At most `limit` entries, each at most `ttl_s` seconds after it was last used.

    on_drop is called with every entry that leaves without having been asked to.
    """

    def __init__(
        self,
        limit: int,
        *,
        ttl_s: float | None = None,
        on_drop: Callable[[K, V], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._on_drop = on_drop
        self._clock = clock
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        self._expire()
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, which counts as used now; None if there is none."""
        self._expire()
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._put(key, entry[1])
        return entry[1]

    def put(self, key: K, value: V) -> None:
        self._expire()
        self._put(key, value)
        while len(self._entries) > self._limit:
            self._drop_oldest()

    def pop(self, key: K) -> V | None:
        """Take an entry out; `on_drop` is not called."""
        entry = self._entries.pop(key, None)
        return entry[1] if entry is not None else None

    def values(self) -> Iterator[V]:
        return (value for _, value in self._entries.values())

    def _put(self, key: K, value: V) -> None:
        self._entries[key] = (self._clock(), value)
        self._entries.move_to_end(key)

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        oldest_allowed = self._clock() - self._ttl_s
        # Entries are in the order of their last use, so the expired ones are all in front.
        while self._entries and next(iter(self._entries.values()))[0] < oldest_allowed:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, (_, value) = self._entries.popitem(last=False)
        if self._on_drop is not None:
            self._on_drop(key, value)
