"""What the front asks of sessions: plain records and the errors that reach a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.api import SamplingParams

Event = dict[str, Any]
"""One event of the Responses protocol: `type`, `sequence_number` and the fields that type requires."""

Item = dict[str, Any]
"""One input or output item of the Responses protocol, as JSON has it."""


class SessionError(Exception):
    """A request that is refused. Carries everything a client is told, and nothing internal."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        status: int = 400,
        param: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.param = param
        self.type = type


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One `response.create`, validated.

    owner: who asks, set by the server; nobody sees what another owner stored.
    scope: the connection it came over. With `store=False` the turn can be named by this connection only.
    input: new items only (a string input is one user message); the history is named by its parent.
    conversation_id, previous_response_id: at most one of them.
    detach: what happens when nobody watches any more: "continue" (stored turns) or "cancel".
    client_msg_id: the same id from the same owner within a day starts no second turn.
    echo: request fields that the response object repeats (temperature, metadata, tools ...).
    """

    owner: str
    input: list[Item]
    model: str
    sampling: SamplingParams
    scope: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation_id: str | None = None
    store: bool = True
    generate: bool = True
    detach: str = "continue"
    client_msg_id: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    echo: dict[str, Any] = field(default_factory=dict)
