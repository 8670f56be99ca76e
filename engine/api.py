"""What the engine is asked and what it answers: plain records, importable without torch.

These cross the process border as msgpack, so every field is a plain value. Token ids travel as lists of ints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request the engine cannot serve. `param` names the field at fault, `code` is stable for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class EngineDead(RuntimeError):
    """The engine process ended while a request was running; the supervisor is starting another."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings are the field's usual ones.

    temperature: 0 is greedy. top_p in (0, 1]. top_k: 0 (or -1) is off. min_p in [0, 1).
    seed: same seed, same prompt, same tokens, whatever else is in the batch.
    max_tokens: at least 1; None is "up to the context length".
    stop: strings that end the answer; they are not part of it.
    stop_token_ids: more ids that end the answer beside the model's own end ids.
    ignore_eos: the model's own end ids do not end the answer (`stop_token_ids` still do).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        def refuse(name: str, expected: str) -> None:
            raise RequestError(f"{name} must be {expected}, got {getattr(self, name)!r}", param=name)

        if not 0.0 <= self.temperature <= 100.0:
            refuse("temperature", "a number from 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "a number above 0 and up to 1")
        if self.top_k < -1:
            refuse("top_k", "0 (off) or a positive whole number")
        if not 0.0 <= self.min_p < 1.0:
            refuse("min_p", "a number from 0 to below 1")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            refuse("seed", "a 64-bit whole number")
        if self.max_tokens is not None and self.max_tokens < 1:
            refuse("max_tokens", "at least 1")
        if not -2.0 <= self.presence_penalty <= 2.0:
            refuse("presence_penalty", "a number from -2 to 2")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            refuse("frequency_penalty", "a number from -2 to 2")
        # A bare string would otherwise be taken for a tuple of its letters.
        stop = cast("str | tuple[str, ...]", self.stop)
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not all(self.stop):
            refuse("stop", "strings that are not empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer to compute.

    request_id: chosen by the caller, unique among running requests.
    prompt_ids: the whole context, exact token ids; the cache finds what it already holds by comparing them.
    tenant: whose prefix tree is searched; nothing is ever shared between tenants.
    branch: name of the idle branch that shall point at this request's KV when it ends (a conversation's tip).
        None leaves the KV in the tree unnamed: found again by its tokens, and first to be reclaimed.
    generate: False only computes the prompt's KV (warm-up); it ends with `finish_reason` "stop" and no
        tokens.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = "default"
    branch: str | None = None
    generate: bool = True


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Where the prompt's KV came from: `total == reused + computed`, always. Counted in tokens."""

    total: int
    reused: int
    computed: int


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought for one request.

    token_ids: an end token (`finish_reason` "stop") is the last of them.
    prompt: comes with the first tokens and again at the end; None at the end of a request whose prompt was
        never computed in full.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    prompt: PromptUsage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front needs to know about the engine it talks to.

    `boot_id` changes with every engine process.
    """

    boot_id: str
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    block_bytes: int
    dtype: str
    device: str
    attention_backend: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and running totals, as `/metrics` shows them.

    Blocks: total == free + idle + pinned + reserved. tokens_resident of slots_allocated KV slots hold a
    token. prefix_hits_tokens of prefix_queries_tokens prompt tokens were found resident, each prompt counted
    once, when all of it had been computed.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_idle: int = 0
    blocks_pinned: int = 0
    blocks_reserved: int = 0
    blocks_shared: int = 0
    branches: int = 0
    tokens_resident: int = 0
    slots_allocated: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineClient(Protocol):
    """The one seam between sessions and the engine. Tests put a scripted engine behind it."""

    @property
    def info(self) -> EngineInfo:
        """Raises `EngineDead` while no engine is up."""
        ...

    @property
    def ready(self) -> bool: ...

    async def start(self) -> None:
        """Return when the engine answers.

        Raises `RuntimeError` with the engine's own words if it cannot start.
        """
        ...

    async def close(self) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Output]:
        """Stream one answer. The last output carries a `finish_reason`.

        Closing the iterator early aborts the request within one step. Raises `RequestError` for a request
        that can never run and `EngineDead` when the engine process ends before the answer does.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with `finish_reason` "abort". Unknown ids are ignored."""
        ...

    async def release(self, tenant: str, branch: str) -> None:
        """Forget a branch: blocks that nothing else points to are free at once."""
        ...

    async def stats(self) -> EngineStats: ...


def pack_record(record: Any) -> dict[str, Any]:
    """A record as a plain dict, for msgpack. Lists stay as they are: a prompt is thousands of ids long."""
    packed: dict[str, Any] = {}
    for field_ in dataclasses.fields(record):
        value = getattr(record, field_.name)
        packed[field_.name] = pack_record(value) if dataclasses.is_dataclass(value) else value
    return packed


def unpack_request(data: dict[str, Any]) -> GenerateRequest:
    """The inverse of `pack_record` for a request. Raises `RequestError` on values out of range."""
    sampling = SamplingParams(**data.pop("sampling"))
    return GenerateRequest(sampling=sampling, **data)
