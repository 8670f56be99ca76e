"""One answer from the engine: ids in, text out, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Any, cast

from engine.api import (
    EngineClient,
    EngineDead,
    FinishReason,
    GenerateRequest,
    Output,
    PromptUsage,
    RequestError,
)
from engine.detokenizer import TextStream
from sessions import tokens
from sessions.response import ResponseStatus
from sessions.turn import TurnWriter

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
"""How long the engine may take to confirm that it has stopped; it takes a step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended. `output_ids` are those that the next turn goes on from."""

    status: ResponseStatus
    text: str
    output_ids: array[int]
    prompt: PromptUsage
    generated: int
    incomplete_reason: str | None = None
    error: dict[str, Any] | None = None


class Generation:
    """Runs a request and writes its text. `cancel` ends it within one step of the engine.

    end_ids: tokens that end an answer and are no part of it.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: GenerateRequest,
        *,
        stream: TextStream,
        end_ids: Collection[int],
        writer: TurnWriter,
        cancelled: asyncio.Event,
    ) -> None:
        self._engine = engine
        self._request = request
        self._stream = stream
        self._end_ids = end_ids
        self._writer = writer
        self._cancelled = cancelled
        self._ids = tokens.ids()
        self._generated = 0
        self._prompt = PromptUsage(0, 0, 0)
        self._finish: FinishReason | None = None

    async def run(self) -> Outcome:
        """Never raises for what may go wrong in the engine: that is an outcome, too."""
        if self._cancelled.is_set():
            return self._outcome(None)
        error: dict[str, Any] | None = None
        try:
            # An abort that the engine does not confirm in time counts as done.
            async with asyncio.timeout(None) as patience:
                stopper = asyncio.create_task(self._stop_on_cancel(patience))
                try:
                    await self._follow(patience)
                finally:
                    stopper.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await stopper
        except TimeoutError:
            log.warning("the engine did not confirm the end of %s", self._request.request_id)
        except EngineDead:
            error = _error(
                "server_error", "The engine stopped while this answer was being written. Try again."
            )
        except RequestError as exc:
            error = _error("invalid_prompt", exc.message)
        except Exception:
            log.exception("generating %s failed", self._request.request_id)
            error = _error("server_error", "Something went wrong on the server.")
        if self._finish == "error":
            error = _error("server_error", "The engine could not finish this answer.")
        return self._outcome(error)

    async def _follow(self, patience: asyncio.Timeout) -> None:
        outputs = cast("AsyncGenerator[Output, None]", self._engine.generate(self._request))
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.prompt is not None:
                    self._prompt = output.prompt
                if self._over:
                    continue  # what came after the end is nobody's
                self._take(output)
                if self._stream.stopped and output.finish_reason is None:
                    await self._abort(patience)

    @property
    def _over(self) -> bool:
        return self._stream.stopped or self._cancelled.is_set() or self._finish is not None

    def _take(self, output: Output) -> None:
        self._finish = output.finish_reason
        if output.error is not None:
            log.error("the engine failed %s: %s", self._request.request_id, output.error)
        ids = output.token_ids
        self._generated += len(ids)
        if ids and output.finish_reason == "stop" and ids[-1] in self._end_ids:
            ids = ids[:-1]
        if not self._request.generate:
            return
        self._ids.extend(ids)
        piece = self._stream.push(ids)
        if output.token_ids:
            self._writer.text(piece)

    async def _stop_on_cancel(self, patience: asyncio.Timeout) -> None:
        await self._cancelled.wait()
        await self._abort(patience)

    async def _abort(self, patience: asyncio.Timeout) -> None:
        patience.reschedule(asyncio.get_running_loop().time() + ABORT_TIMEOUT_S)
        with contextlib.suppress(EngineDead):
            await self._engine.abort(self._request.request_id)

    def _outcome(self, error: dict[str, Any] | None) -> Outcome:
        rest = self._stream.finish()
        if rest:
            self._writer.text(rest)
        kept = self._ids[: self._stream.kept_tokens]
        status: ResponseStatus = "completed"
        reason = None
        if error is not None:
            status = "failed"
        elif self._stream.stopped or self._finish == "stop":
            pass
        elif self._finish == "length":
            status, reason = "incomplete", "max_output_tokens"
        else:
            status = "cancelled"
        return Outcome(status, self._stream.text, kept, self._prompt, self._generated, reason, error)


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message}
