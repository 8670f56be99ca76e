"""The store in Redis or Valkey. Every mutation is one Lua script; the scripts and the keys are in `lua/`.

Keys, behind a common prefix: `turn:<id>` (hash), `log:<id>` (stream whose ids are event numbers), `conv:<id>`
(hash), `turns:<id>` and `convs:<owner>` (sorted by time), `idem:<owner>:<message>`, `worker:<id>` (alive
while it exists). A script reaches keys that it finds in others, so this is for one server, not for a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError

from sessions.eventlog import Entry
from sessions.ids import new_id
from sessions.records import (
    conversation_of,
    pack,
    pack_entry,
    pack_head,
    pack_tail,
    turn_of,
    unpack_entry,
)
from sessions.store import (
    BeginOutcome,
    ConversationRecord,
    Page,
    StoreUnavailable,
    TurnRecord,
    UpdateOutcome,
)

log = logging.getLogger(__name__)

TURN_TTL_S = 30 * 24 * 3600
"""How long a turn outside any conversation is kept after it was last used."""
MESSAGE_TTL_S = 24 * 3600
LOG_TTL_S = 3600
LOG_ENTRIES = 20_000
WORKER_TTL_S = 15
MAX_DEPTH = 100_000
SCRIPTS = (
    "begin_turn",
    "finish_turn",
    "chain",
    "delete_turn",
    "request_cancel",
    "append_log",
    "create_conversation",
    "update_conversation",
    "delete_conversation",
    "conversations",
)

T = TypeVar("T")


class RedisStore:
    """A `Store` over one Redis or Valkey server.

    url: redis://, rediss:// or unix://.
    exclusive: no other process uses this store, so whoever wrote to it before is gone.
    """

    def __init__(self, url: str, *, prefix: str = "pageturner:", exclusive: bool = False) -> None:
        self._prefix = prefix
        self._exclusive = exclusive
        self._worker = new_id("worker")
        # One retry: every script may be sent twice, and a person waits for the answer.
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=5.0,
            socket_connect_timeout=5.0,
            health_check_interval=30,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 1),
        )
        common = _lua("common")
        self._scripts = {name: self._redis.register_script(common + _lua(name)) for name in SCRIPTS}
        self._heartbeat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            await self._redis.eval("return 1", 0)
        except ResponseError as exc:
            raise RuntimeError(f"the store cannot run Lua scripts: {exc}") from exc
        except (RedisError, OSError) as exc:
            raise RuntimeError(f"the store cannot be reached: {exc}") from exc
        if self._exclusive:
            async for key in self._redis.scan_iter(match=self._prefix + "worker:*"):
                await self._redis.delete(key)
        await self._beat()
        self._heartbeat = asyncio.create_task(self._keep_beating())

    async def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._heartbeat
            self._heartbeat = None
            with contextlib.suppress(RedisError, OSError):
                await self._redis.delete(self._prefix + "worker:" + self._worker)
        await self._redis.aclose()

    async def begin_turn(self, turn: TurnRecord, *, client_msg_id: str | None = None) -> BeginOutcome:
        kind, response_id = await self._run(
            "begin_turn",
            turn.id,
            turn.owner,
            turn.parent_id or "",
            turn.conversation_id or "",
            self._worker,
            pack_head(turn),
            pack_tail(turn),
            client_msg_id or "",
            _now_ms(),
            TURN_TTL_S,
            MESSAGE_TTL_S,
        )
        return BeginOutcome(kind.decode(), response_id.decode() or None)

    async def finish_turn(self, turn: TurnRecord, *, advance: bool) -> bool:
        return await self._finish(turn, advance=advance, orphans_only=False)

    async def interrupt_turn(self, turn: TurnRecord) -> bool:
        return await self._finish(turn, advance=False, orphans_only=True)

    async def turn(self, response_id: str) -> TurnRecord | None:
        rows = await self._run("chain", response_id, TURN_TTL_S, 1, self._worker)
        return turn_of(rows[0]) if rows else None

    async def chain(self, response_id: str) -> list[TurnRecord]:
        rows = await self._run("chain", response_id, TURN_TTL_S, MAX_DEPTH, self._worker)
        return [turn_of(row) for row in reversed(rows)]

    async def delete_turn(self, owner: str, response_id: str) -> bool:
        return bool(await self._run("delete_turn", response_id, owner, _now_ms()))

    async def request_cancel(self, response_id: str) -> None:
        await self._run("request_cancel", response_id)

    async def append_log(self, response_id: str, entries: Sequence[Entry]) -> bool:
        packed: list[Any] = []
        for entry in entries:
            packed += (entry.last, pack_entry(entry))
        return bool(await self._run("append_log", response_id, LOG_TTL_S, LOG_ENTRIES, *packed))

    async def read_log(self, response_id: str, after: int) -> list[Entry] | None:
        # An entry's stream id is one more than its last number, since 0-0 is not a valid id.
        key = f"{self._prefix}log:{response_id}"
        rows: Any = await self._call(lambda: self._redis.xrange(key, min=f"{after + 2}-0"))
        entries = [unpack_entry(fields[b"e"]) for _, fields in rows]
        return None if entries and entries[0].first > after + 1 else entries

    async def create_conversation(self, owner: str, metadata: dict[str, str]) -> ConversationRecord:
        conversation_id, now = new_id("conv"), _now_ms()
        rev = await self._run("create_conversation", conversation_id, owner, pack(metadata), now)
        return ConversationRecord(conversation_id, owner, now, now, int(rev), metadata=metadata)

    async def conversation(self, conversation_id: str) -> ConversationRecord | None:
        key = f"{self._prefix}conv:{conversation_id}"
        row: Any = await self._call(lambda: self._redis.hgetall(key))
        if not row:
            return None
        names = (b"owner", b"created", b"updated", b"rev", b"leaf", b"active", b"metadata")
        return conversation_of([conversation_id.encode(), *(row.get(name, b"") for name in names)])

    async def conversations(self, owner: str, *, after: str | None, limit: int) -> Page:
        rows = await self._run("conversations", owner, after or "", limit)
        return Page([conversation_of(row) for row in rows[:limit]], has_more=len(rows) > limit)

    async def update_conversation(
        self, owner: str, conversation_id: str, metadata: dict[str, str], *, rev: int | None
    ) -> UpdateOutcome:
        expected = "" if rev is None else rev
        kind, current = await self._run(
            "update_conversation", conversation_id, owner, expected, pack(metadata), _now_ms()
        )
        return UpdateOutcome(kind.decode(), int(current))

    async def delete_conversation(self, owner: str, conversation_id: str) -> list[str] | None:
        turns = await self._run("delete_conversation", conversation_id, owner, TURN_TTL_S)
        return None if turns is None else [turn.decode() for turn in turns]

    async def _finish(self, turn: TurnRecord, *, advance: bool, orphans_only: bool) -> bool:
        done = await self._run(
            "finish_turn",
            turn.id,
            pack_tail(turn),
            turn.response["status"],
            int(advance),
            _now_ms(),
            LOG_TTL_S,
            self._worker if orphans_only else "",
        )
        return bool(done)

    async def _run(self, script: str, *args: Any) -> Any:
        run = functools.partial(self._scripts[script], args=[self._prefix, *args])
        return await self._call(run)

    async def _call(self, command: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            result = await command()
            if task is not None and task.cancelling() > cancels:
                # The client library uses `asyncio.wait_for`, which loses a cancellation now and then up to
                # Python 3.11; whoever cancelled would wait for ever.
                raise asyncio.CancelledError
            return result
        except ResponseError:
            raise  # a fault of ours, not of the connection
        except (RedisError, OSError) as exc:
            log.warning("the store does not answer: %s", exc)
            raise StoreUnavailable from exc

    async def _beat(self) -> None:
        key = self._prefix + "worker:" + self._worker
        await self._call(lambda: self._redis.set(key, 1, ex=WORKER_TTL_S))

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(WORKER_TTL_S / 3)
            with contextlib.suppress(StoreUnavailable):
                await self._beat()


def _lua(name: str) -> str:
    return files("sessions").joinpath("lua", name + ".lua").read_text(encoding="utf-8")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
