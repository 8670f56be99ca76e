"""`/v1/chat/completions`: for clients that send the whole history each time.

Nothing is stored. The KV of what was sent before is still found, by comparing tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from app.errors import ApiError, error_body
from app.http.replies import JSON, SSE_DONE, EventStream, sse_data
from app.http.responses import Turn
from app.http.routing import Call, route
from app.models import ChatCompletionCreate, validate
from app.specs import chat_spec
from app.tasks import closing
from sessions.api import SessionError

SYSTEM_FINGERPRINT = "pageturner"


def chat_routes() -> list[BaseRoute]:
    return [route("/v1/chat/completions", create, ["POST"])]


async def create(call: Call) -> Response:
    body = validate(ChatCompletionCreate, await call.json())
    model = call.services.served_model_name
    scope = f"chat_{secrets.token_hex(8)}"
    try:
        turn = Turn(call.services, chat_spec(body, owner=call.owner, scope=scope, model=model))
        await turn.begin()
    except SessionError as exc:
        raise _renamed(exc) from exc
    completion = Completion(model)
    if body.stream:
        include_usage = bool((body.stream_options or {}).get("include_usage"))
        return EventStream(completion.chunks(turn, include_usage=include_usage))
    response = await turn.result(call)
    return JSON(completion.whole(response))


class Completion:
    """A response of ours in the older protocol's words."""

    def __init__(self, model: str) -> None:
        self._base: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def whole(self, response: dict[str, Any]) -> dict[str, Any]:
        """Raises `ApiError` when the response failed."""
        if response["status"] == "failed":
            raise _failure(response)
        message = {"role": "assistant", "content": output_text(response), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(response)}
        return self._base | {"object": "chat.completion", "choices": [choice], "usage": usage(response)}

    async def chunks(self, turn: Turn, *, include_usage: bool) -> AsyncIterator[bytes]:
        async with closing(turn.events()) as events:
            async for event in events:
                kind = event["type"]
                if kind == "response.created":
                    yield self._chunk({"role": "assistant", "content": ""}, include_usage=include_usage)
                elif kind == "response.output_text.delta":
                    yield self._chunk({"content": event["delta"]}, include_usage=include_usage)
                elif kind == "response.failed":
                    yield sse_data(error_body(_failure(event["response"])))
                elif kind in ("response.completed", "response.incomplete"):
                    response = event["response"]
                    yield self._chunk({}, finish_reason(response), include_usage=include_usage)
                    if include_usage:
                        last = {"object": "chat.completion.chunk", "choices": [], "usage": usage(response)}
                        yield sse_data(self._base | last)
        yield SSE_DONE

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, *, include_usage: bool) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = self._base | {"object": "chat.completion.chunk", "choices": [choice]}
        return sse_data(chunk | {"usage": None} if include_usage else chunk)


def output_text(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    )


def finish_reason(response: dict[str, Any]) -> str:
    details = response.get("incomplete_details") or {}
    return "length" if details.get("reason") == "max_output_tokens" else "stop"


def usage(response: dict[str, Any]) -> dict[str, Any]:
    used = response["usage"]
    return {
        "prompt_tokens": used["input_tokens"],
        "completion_tokens": used["output_tokens"],
        "total_tokens": used["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": used["input_tokens_details"]["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _failure(response: dict[str, Any]) -> ApiError:
    error = response.get("error") or {}
    message = error.get("message") or "The answer failed."
    return ApiError(message, code=error.get("code") or "server_error", status=500, type="server_error")


def _renamed(exc: SessionError) -> SessionError:
    """An error about a field, under the name the field has in this protocol."""
    names = {"input": "messages", "max_output_tokens": "max_tokens"}
    param = names.get(exc.param or "", exc.param)
    return ApiError(exc.message, code=exc.code, status=exc.status, param=param, type=exc.type)
