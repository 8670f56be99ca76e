"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from engine.api import FinishReason, GenerateRequest, PromptUsage

if TYPE_CHECKING:
    from cache.table import Table
    from engine.sampler import SamplingState


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and where it stands. Equal only to itself.

    token_ids: prompt and answer. `table.kv_len` of them were forwarded; the last sampled one never yet was.
    max_len: the most tokens prompt and answer may have together.
    epoch: moves whenever the sequence starts or stops running. What a step computed counts only if the epoch
        is still the one it was scheduled in.
    seat: its row in the runner's block tables while it runs.
    seated_blocks, seated_version: how much of the table, and which state of it, that row holds.
    branch: the name its KV gets at the end; None once that name was released.
    prompt_reused: prompt tokens found in the cache when it was first admitted. Preemption does not change it.
    """

    request: GenerateRequest
    sampling: SamplingState
    stop_ids: frozenset[int]
    max_len: int
    token_ids: list[int] = field(init=False)
    phase: Phase = Phase.WAITING
    epoch: int = 0
    table: Table | None = None
    seat: int = -1
    seated_blocks: int = 0
    seated_version: int = -1
    prompt_reused: int | None = None
    usage: PromptUsage | None = None
    branch: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.branch = self.request.branch
        self.token_ids = list(self.request.prompt_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens to forward before the next one can be sampled."""
        return len(self.token_ids) - (self.table.kv_len if self.table is not None else 0)

    def take_prompt_usage(self) -> PromptUsage | None:
        """The prompt's account, once: at the moment all of it has been forwarded for the first time."""
        if self.usage is not None or self.prompt_reused is None:
            return None
        reused = self.prompt_reused
        self.usage = PromptUsage(self.prompt_len, reused, self.prompt_len - reused)
        return self.usage

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token. Returns why the answer ends with it, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_len else None
