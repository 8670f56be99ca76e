"""Input items of a request, checked and brought to one form: messages with a list of text parts."""

from __future__ import annotations

from typing import Any

from app.errors import ApiError, wrong
from sessions.api import Item

ROLES = ("user", "assistant", "system", "developer")
MAX_ITEMS = 4096

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MEDIA_PARTS = {"input_image", "image_url", "input_file", "file", "input_audio", "audio"}
_OTHER_ITEMS = {
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
    "compaction",
}


def input_items(value: Any, param: str = "input") -> list[Item]:
    """A string is one user message; a list is checked item by item. Raises `ApiError` naming the element."""
    if isinstance(value, str):
        return [message("user", value)]
    if not isinstance(value, list):
        raise wrong(param, "a string or an array of items", value)
    if len(value) > MAX_ITEMS:
        raise ApiError(f"{param} has {len(value)} items, at most {MAX_ITEMS} are accepted", param=param)
    return [_item(item, f"{param}[{index}]") for index, item in enumerate(value)]


def message(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": [_part(role, text)]}


def _part(role: str, text: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _item(item: Any, path: str) -> Item:
    if not isinstance(item, dict):
        raise wrong(path, "an object", item)
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in _OTHER_ITEMS:
        raise ApiError(
            f"{path}.type {kind!r} is not supported: this server takes messages only",
            param=f"{path}.type",
            code="unsupported_item_type",
        )
    if kind != "message":
        raise wrong(f"{path}.type", '"message"', kind)
    role = item.get("role")
    if role not in ROLES:
        raise wrong(f"{path}.role", "one of " + ", ".join(ROLES), role)
    content = item.get("content")
    if isinstance(content, str):
        return message(role, content)
    if not isinstance(content, list):
        raise wrong(f"{path}.content", "a string or an array of text parts", content)
    parts = [_part(role, _text(part, f"{path}.content[{index}]")) for index, part in enumerate(content)]
    return {"type": "message", "role": role, "content": parts}


def _text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong(path, "an object", part)
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA_PARTS:
        raise ApiError(
            f"{path}.type {kind!r} is not supported: the model reads text only",
            param=f"{path}.type",
            code="unsupported_content",
        )
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise wrong(f"{path}.type", "input_text, output_text or refusal", kind)
    text = part.get(field)
    if not isinstance(text, str):
        raise wrong(f"{path}.{field}", "a string", text)
    return text
