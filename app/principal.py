"""Who a request comes from: API keys, the page's cookie, and the owner they stand for."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import HTTPConnection

COOKIE = "pageturner_session"
COOKIE_SECONDS = 30 * 24 * 3600

LOCAL_OWNER = "local"
"""The one owner of a server without keys."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated asker. `owner` is what sessions keep things under; `by_cookie`: a browser sent it."""

    owner: str
    by_cookie: bool = False
    expires_at: float | None = None

    def expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


def owner_of(key: str) -> str:
    """A stable name for a key's owner that does not give the key away."""
    return "key_" + hashlib.sha256(b"pageturner owner\0" + key.encode()).hexdigest()[:24]


class Keys:
    """The keys a server accepts. Without any, everyone who reaches the server is the local owner."""

    def __init__(self, keys: Sequence[str], *, clock: Callable[[], float] = time.time) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._clock = clock

    @property
    def required(self) -> bool:
        return bool(self._keys)

    def principal(self, connection: HTTPConnection) -> Principal | None:
        """Who asks, by `Authorization: Bearer` or by the session cookie; None: nobody known."""
        if not self._keys:
            return Principal(LOCAL_OWNER)
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            key = self._known(token.strip())
            return Principal(owner_of(key)) if key is not None else None
        return self._from_cookie(connection.cookies.get(COOKIE, ""))

    def login(self, key: str) -> str | None:
        """A cookie value for a key, or None for an unknown one. It names no key and ends by itself."""
        known = self._known(key)
        if known is None:
            return None
        expires = str(int(self._clock()) + COOKIE_SECONDS)
        return f"{expires}.{_sign(known.encode(), expires)}"

    def _known(self, token: str) -> str | None:
        found: bytes | None = None
        # Every key is compared, so that the time taken does not tell which one was close.
        for key in self._keys:
            if hmac.compare_digest(key, token.encode()):
                found = key
        return found.decode() if found is not None else None

    def _from_cookie(self, value: str) -> Principal | None:
        expires, _, signature = value.partition(".")
        if not re.fullmatch(r"[0-9]{1,12}", expires) or int(expires) <= self._clock():
            return None
        for key in self._keys:
            if hmac.compare_digest(_sign(key, expires).encode(), signature.encode()):
                return Principal(owner_of(key.decode()), by_cookie=True, expires_at=float(expires))
        return None


def _sign(key: bytes, text: str) -> str:
    return hmac.new(key, b"pageturner cookie\0" + text.encode(), hashlib.sha256).hexdigest()
