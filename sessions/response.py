"""The response object of the protocol, and the items in it."""

from __future__ import annotations

from typing import Any, Literal

from engine.api import PromptUsage
from sessions.api import Item, TurnSpec

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

Response = dict[str, Any]


def new_response(response_id: str, spec: TurnSpec, *, created_at: int, status: ResponseStatus) -> Response:
    """The response object as it is before anything was generated."""
    response: Response = {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": spec.instructions,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": spec.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": spec.previous_response_id,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": spec.store,
        "temperature": spec.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": spec.sampling.top_p,
        "presence_penalty": spec.sampling.presence_penalty,
        "frequency_penalty": spec.sampling.frequency_penalty,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "metadata": dict(spec.metadata),
    }
    if spec.conversation_id is not None:
        response["conversation"] = {"id": spec.conversation_id}
    # What a request says about itself may be repeated; what the server says about it may not be overwritten.
    response.update({name: value for name, value in spec.echo.items() if name not in _OURS})
    return response


_OURS = {
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "error",
    "incomplete_details",
    "model",
    "output",
    "previous_response_id",
    "store",
    "usage",
    "conversation",
}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def output_message(item_id: str, text: str | None, status: ItemStatus) -> Item:
    """An answer as an output item. text: None while it has no content part yet."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [] if text is None else [text_part(text)],
    }


def usage(prompt: PromptUsage, output_tokens: int) -> dict[str, Any]:
    """Exact token counts: every prompt token was either found in the KV cache or computed."""
    return {
        "input_tokens": prompt.total,
        "input_tokens_details": {
            "cached_tokens": prompt.reused,
            "cache_write_tokens": prompt.computed,
            "device": prompt.reused,
            "computed": prompt.computed,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt.total + output_tokens,
    }
