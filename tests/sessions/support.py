"""Stand-ins for tests of sessions: a scripted engine, small tokenizers, and a front in a few lines.

The engine here is scripted: it has no model and no KV, and answers what a test tells it to. What it says
about reuse is what a real one would: the longest prefix it has forwarded before, for the same tenant. The
real engine has its own tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.api import (
    EngineDead,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    Output,
    PromptUsage,
    SamplingParams,
)
from sessions import ChatTokenizer, Sessions
from sessions.api import Event, Item, TurnSpec
from sessions.service import Turn

INFO = EngineInfo(
    boot_id="boot",
    model="scripted",
    max_model_len=4096,
    vocab_size=300,
    eos_token_ids=[2],
    block_size=16,
    num_blocks=64,
    block_bytes=1024,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
)

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<s>system\nYou help.<e>\n' }}{% endif %}"
    "{{ '<s>' + message['role'] + '\n' + message['content'] + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{{ '<x>' }}{% for message in messages %}"
    "{{ '<s>' + message['role'] + '<b>\n\n' + message['content'] | trim + '<e>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant<b>\n\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ '<x>' }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<s>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n'"
    " + message['content'] | trim + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>model\n' }}{% endif %}"
)
INLINE = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}"
    "{{ '<x>[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' <e>' }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for message in messages %}"
    "{{ '<s>' + message['role'] + '\n' + message['content'] + '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n<t>\n' }}{% endif %}"
)
"""Puts a thinking mark before an answer that is due, and leaves it out of the history."""

EXTENDING = {"chatml": CHATML, "trimmed": TRIMMED, "no_system": NO_SYSTEM}


@functools.cache
def toy_tokenizer(template: str = CHATML) -> ChatTokenizer:
    """Every byte a token, and a few control tokens: small enough to see what happens."""
    marks = ["<pad>", "<s>", "<e>", "<x>", "<b>", "<t>", "<tool>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*marks, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # The last two are added tokens without being special ones, as tool and thinking marks often are.
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks[:-2]])
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks[-2:]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", pad_token="<pad>")
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer)


@functools.cache
def raw_default_tokenizer() -> Any:
    from engine.model.source import resolve_model
    from engine.tokenizer import load_tokenizer

    return load_tokenizer(resolve_model(None))


@functools.cache
def default_tokenizer() -> ChatTokenizer:
    """The default model's own."""
    return ChatTokenizer(raw_default_tokenizer())


def ids_of(text: str, tokenizer: ChatTokenizer | None = None) -> list[int]:
    return (tokenizer or toy_tokenizer()).encode_text(text)


Script = Callable[[GenerateRequest], Sequence[int]]


def says(*answers: str, tokenizer: ChatTokenizer | None = None) -> Script:
    """Answers in this order, again from the front when they are used up; each ends by itself."""
    turns = itertools.cycle(answers)
    return lambda request: [*ids_of(next(turns), tokenizer), 2]


class ScriptedEngine:
    """An `EngineClient` whose answers come from `script`. `pause` stops it between tokens, `die` ends it."""

    def __init__(self, script: Script | None = None, **info: Any) -> None:
        self.script = script or says("ok")
        self.requests: list[GenerateRequest] = []
        self.released: list[tuple[str, str]] = []
        self.forwarded: dict[str, list[list[int]]] = {}
        self.running: set[str] = set()
        self.deaf = False
        self._info = dataclasses.replace(INFO, **info)
        self._aborted: set[str] = set()
        self._paused = False
        self._dead = False
        self._steps = 0
        self._changed = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        if self._dead:
            raise EngineDead("dead")
        return self._info

    @property
    def ready(self) -> bool:
        return not self._dead

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    def pause(self) -> None:
        self._paused = True

    def step(self, tokens: int = 1) -> None:
        """Let a paused engine bring so many more tokens."""
        self._steps += tokens
        self._wake()

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def die(self) -> None:
        self._dead = True
        self._wake()

    def revive(self) -> None:
        self._dead = False
        self.forwarded.clear()

    async def abort(self, request_id: str) -> None:
        if not self.deaf:
            self._aborted.add(request_id)
            self._wake()

    async def release(self, tenant: str, branch: str) -> None:
        self.released.append((tenant, branch))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Output]:
        self.requests.append(request)
        self.running.add(request.request_id)
        told = 0
        prompt = None
        try:
            answer = list(self.script(request)) if request.generate else []
            limit = request.sampling.max_tokens
            if limit is not None and len(answer) > limit:
                answer, ending = answer[:limit], "length"
            else:
                ending = "stop"
            await self._next_step(request.request_id)
            prompt = self._forward(request)
            for token in answer:
                if request.request_id in self._aborted:
                    break
                told += 1
                last = told == len(answer)
                yield Output(
                    request.request_id,
                    [token],
                    ending if last else None,  # type: ignore[arg-type]
                    prompt if told == 1 or last else None,
                )
                if last:
                    return
                await self._next_step(request.request_id)
            if request.request_id in self._aborted:
                yield Output(request.request_id, [], "abort", prompt)
            else:
                yield Output(request.request_id, [], "stop", prompt)
        finally:
            self.running.discard(request.request_id)
            if prompt is not None and told:
                self._remember(request.tenant, request.prompt_ids + answer[: told - 1])

    async def _next_step(self, request_id: str) -> None:
        await asyncio.sleep(0)
        while self._paused and not self._dead and request_id not in self._aborted:
            if self._steps:
                self._steps -= 1
                break
            await self._changed.wait()
        if self._dead:
            raise EngineDead("dead")

    def _forward(self, request: GenerateRequest) -> PromptUsage:
        total = len(request.prompt_ids)
        reused = min(
            max(
                (_common(seen, request.prompt_ids) for seen in self.forwarded.get(request.tenant, [])),
                default=0,
            ),
            total - 1,
        )
        self._remember(request.tenant, request.prompt_ids)
        return PromptUsage(total, reused, total - reused)

    def _remember(self, tenant: str, ids: list[int]) -> None:
        self.forwarded.setdefault(tenant, []).append(list(ids))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def user(text: str) -> Item:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": text}


def spec(text: str | None = "hello", **fields: Any) -> TurnSpec:
    fields.setdefault("owner", "ann")
    fields.setdefault("model", "scripted")
    fields.setdefault("sampling", SamplingParams(temperature=0.0, max_tokens=None))
    fields.setdefault("input", [user(text)] if text is not None else [])
    return TurnSpec(**fields)


async def watch(turn: Turn, starting_after: int = -1) -> list[Event]:
    """All events of a turn, to its end."""
    return [event async for event in turn.events(starting_after)]


async def finished(sessions: Sessions, turn_spec: TurnSpec) -> dict[str, Any]:
    """Run a turn to its end; the response."""
    turn = await sessions.begin(turn_spec)
    return (await watch(turn))[-1]["response"]  # type: ignore[no-any-return]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def text_in(events: Sequence[Event]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until something is so; a test that waits in vain fails by its own time limit."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # what is waited for knows nothing of tests
            await asyncio.sleep(0.001)
