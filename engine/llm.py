"""The same engine without a server: prompts in, answers out, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.api import FinishReason, GenerateRequest, Output, PromptUsage, RequestError, SamplingParams
from engine.build import build_engine
from engine.config import EngineConfig
from engine.detokenizer import TextStream
from engine.model.source import resolve_model
from engine.tokenizer import load_tokenizer

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

ChatMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `token_ids` are all its tokens, an end token included; `text` has no end token in it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers (one). `prompt` is None if it was given as token ids."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: PromptUsage


class LLM:
    """A model ready to answer many prompts at once.

    model: a hub id, a folder or a `.gguf` file; None is the default model. Further settings are those of
    `EngineConfig`. What a prompt shares with an earlier one is computed once, across calls too.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._engine = build_engine(EngineConfig.from_dict({"model": model, **settings}))
        self._tokenizer = load_tokenizer(resolve_model(model))
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer every prompt; the results come in the order of the prompts.

        prompts: texts, or lists of token ids. sampling_params: one for all, or one for each.
        progress: show a progress bar. Raises `RequestError` naming the prompt that can never run.
        """
        given: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        ids = [self._encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in given]
        params = _one_for_each(sampling_params, len(given))
        return self._run(texts, ids, params, progress=progress)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, given as messages with `role` and `content`."""
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations: list[Any] = list(messages) if several else [messages]
        ids = [self._render(conversation) for conversation in conversations]
        params = _one_for_each(sampling_params, len(ids))
        return self._run([None] * len(ids), ids, params, progress=progress)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def _render(self, messages: Sequence[ChatMessage]) -> list[int]:
        # What a message says is text, even where it spells a control token.
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
        )
        return list(ids)

    def _run(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        params: list[SamplingParams],
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        running: dict[str, _Answer] = {}
        answers: list[_Answer] = []
        try:
            for text, prompt_ids, sampling in zip(texts, ids, params, strict=True):
                answer = _Answer(text, prompt_ids, TextStream(self._tokenizer, sampling.stop))
                request_id = str(next(self._request_ids))
                self._submit(GenerateRequest(request_id, prompt_ids, sampling), number=len(answers))
                running[request_id] = answer
                answers.append(answer)
            with _progress_bar(len(answers), shown=progress) as one_done:
                while running:
                    for output in self._engine.step():
                        answer = running[output.request_id]
                        answer.take(output)
                        if output.finish_reason is not None:
                            del running[output.request_id]
                            one_done()
                        elif answer.stopped:
                            self._engine.abort(output.request_id)
            return [answer.result() for answer in answers]
        finally:
            # After an error or Ctrl-C the engine must not go on with what nobody waits for.
            for request_id in running:
                self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step()

    def _submit(self, request: GenerateRequest, *, number: int) -> None:
        try:
            self._engine.add_request(request)
        except RequestError as error:
            raise RequestError(
                f"prompt {number}: {error.message}", param=error.param, code=error.code
            ) from None


class _Answer:
    """One prompt's answer as it grows."""

    def __init__(self, prompt: str | None, prompt_ids: list[int], stream: TextStream) -> None:
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._stream = stream
        self._token_ids: list[int] = []
        self._text = ""
        self._last: Output | None = None

    @property
    def stopped(self) -> bool:
        """A stop string has ended the answer; the engine, which knows no text, does not know yet."""
        return self._stream.stopped

    def take(self, output: Output) -> None:
        self._last = output
        if self.stopped:
            return
        self._token_ids += output.token_ids
        # An end token is no text, even if it is a word that was asked to end the answer.
        shown = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        self._text += self._stream.push(shown)
        if output.finish_reason is not None:
            self._text += self._stream.finish()

    def result(self) -> RequestOutput:
        assert self._last is not None
        reason, usage = self._last.finish_reason, self._last.prompt
        if reason == "error":
            raise RuntimeError(f"the engine failed: {self._last.error}")
        assert reason is not None
        assert usage is not None
        if self.stopped:
            reason = "stop"
            del self._token_ids[self._stream.kept_tokens :]
        completion = CompletionOutput(0, self._text, self._token_ids, reason)
        return RequestOutput(self._prompt, self._prompt_ids, [completion], usage)


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params must be one for all prompts or one for each ({count}), got {len(params)}",
            param="sampling_params",
        )
    return list(params)


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Any]:
    """Yields what to call when a prompt is answered."""
    if not shown:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("Answering", total=total)
        yield lambda: bar.advance(task)
