"""Conversations: the tree of turns, exact token ids, prompt building, event logs and the Redis store."""

from sessions.live import LiveTurn
from sessions.private_valkey import PrivateValkey
from sessions.redis_store import RedisStore
from sessions.service import Sessions, Turn
from sessions.stored import StoredTurn
from sessions.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "LiveTurn",
    "PrivateValkey",
    "RedisStore",
    "Sessions",
    "StoredTurn",
    "Turn",
]
