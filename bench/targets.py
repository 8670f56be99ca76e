"""How a conversation is held with a server: our websocket, or any server's chat completions over HTTP."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import websockets


@dataclass(slots=True)
class TurnRecord:
    """One answer as its reader saw it. Times in seconds."""

    turn: int
    first_token: float
    arrivals: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class Conversation(Protocol):
    async def say(self, text: str, tokens_out: int) -> TurnRecord: ...

    async def close(self) -> None: ...


class Target(Protocol):
    name: str

    async def open(self, system_prompt: str) -> Conversation: ...


@dataclass(slots=True)
class WebsocketTarget:
    """Responses websocket mode: each turn sends its new text only and names its parent."""

    name: str
    url: str
    model: str
    api_key: str | None = None

    async def open(self, system_prompt: str) -> Conversation:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        socket = await websockets.connect(self.url, additional_headers=headers, max_size=None)
        return _WebsocketConversation(socket, self.model, system_prompt)


@dataclass(slots=True)
class _WebsocketConversation:
    socket: Any
    model: str
    system_prompt: str
    parent: str | None = None
    turn: int = 0

    async def say(self, text: str, tokens_out: int) -> TurnRecord:
        request: dict[str, Any] = {
            "type": "response.create",
            "model": self.model,
            "input": text,
            "instructions": self.system_prompt,
            "max_output_tokens": tokens_out,
            "temperature": 0,
            "ignore_eos": True,
        }
        if self.parent:
            request["previous_response_id"] = self.parent
        started = time.perf_counter()
        await self.socket.send(json.dumps(request))
        record = TurnRecord(self.turn, 0.0)
        while True:
            event = json.loads(await self.socket.recv())
            kind = event["type"]
            if kind == "response.output_text.delta":
                record.arrivals.append(time.perf_counter())
                record.text += event["delta"]
            elif kind in ("response.completed", "response.incomplete"):
                break
            elif kind in ("response.failed", "error"):
                raise RuntimeError(f"{kind}: {event}")
        response = event["response"]
        usage = response["usage"]
        record.first_token = (record.arrivals[0] if record.arrivals else time.perf_counter()) - started
        record.output_tokens = usage["output_tokens"]
        record.prompt_tokens = usage["input_tokens"]
        record.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        self.parent, self.turn = response["id"], self.turn + 1
        return record

    async def close(self) -> None:
        await self.socket.close()


@dataclass(slots=True)
class ChatTarget:
    """`/v1/chat/completions`: each turn sends the whole history again, as stateless servers need."""

    name: str
    url: str
    model: str
    api_key: str | None = None

    async def open(self, system_prompt: str) -> Conversation:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        # Some servers close kept-alive connections early, so none is kept.
        limits = httpx.Limits(max_connections=4, max_keepalive_connections=0)
        client = httpx.AsyncClient(timeout=None, limits=limits, headers=headers)
        return _ChatConversation(client, self.url, self.model, [{"role": "system", "content": system_prompt}])


@dataclass(slots=True)
class _ChatConversation:
    client: httpx.AsyncClient
    url: str
    model: str
    messages: list[dict[str, str]]
    turn: int = 0

    async def say(self, text: str, tokens_out: int) -> TurnRecord:
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": tokens_out,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        record = TurnRecord(self.turn, 0.0)
        usage: dict[str, Any] = {}
        started = time.perf_counter()
        async with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {(await reply.aread())[:500]!r}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", []):
                    if piece := (choice.get("delta") or {}).get("content"):
                        record.arrivals.append(time.perf_counter())
                        record.text += piece
        record.first_token = (record.arrivals[0] if record.arrivals else time.perf_counter()) - started
        record.output_tokens = usage.get("completion_tokens") or len(record.arrivals)
        record.prompt_tokens = usage.get("prompt_tokens") or 0
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.messages.append({"role": "assistant", "content": record.text})
        self.turn += 1
        return record

    async def close(self) -> None:
        await self.client.aclose()
