"""Input items: brought to the form they are stored and listed in, and read as messages for the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sessions.api import Item, SessionError
from sessions.ids import new_id
from sessions.tokenizer import ROLES, Message

_TEXT_OF = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def stored_items(items: Sequence[Item], param: str = "input") -> list[Item]:
    """Message items with an id, a status and their content as a list of parts. Raises `SessionError`."""
    return [_stored(item, f"{param}[{index}]") for index, item in enumerate(items)]


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Stored items as the template sees them: `developer` is `system`, parts are joined."""
    messages = []
    for item in items:
        role = "system" if item["role"] == "developer" else item["role"]
        text = "".join(part[_TEXT_OF[part["type"]]] for part in item["content"])
        messages.append(Message(role, text))
    return messages


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """`instructions` are a system message before everything else."""
    return [*([Message("system", instructions)] if instructions else []), *messages]


def _stored(item: Any, path: str) -> Item:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise SessionError(f"{path} must be a message item", param=path)
    role = item.get("role")
    if role != "developer" and role not in ROLES:
        expected = ", ".join((*ROLES, "developer"))
        raise SessionError(f"{path}.role must be one of {expected}, got {role!r}", param=f"{path}.role")
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    if not isinstance(content, list):
        raise SessionError(
            f"{path}.content must be a string or a list of text parts", param=f"{path}.content"
        )
    return {
        "id": new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": [_part(part, f"{path}.content[{number}]") for number, part in enumerate(content)],
    }


def _part(part: Any, path: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    name = _TEXT_OF.get(kind) if isinstance(kind, str) else None
    if name is None or not isinstance(part.get(name), str):
        raise SessionError(f"{path} must be a text part: input_text, output_text or refusal", param=path)
    # Half a surrogate pair is valid JSON and no valid text; nothing further on could encode it.
    text = part[name].encode("utf-8", "replace").decode("utf-8")
    if kind == "output_text":
        return {"type": kind, name: text, "annotations": [], "logprobs": []}
    return {"type": kind, name: text}
