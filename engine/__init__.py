"""The engine: requests in, token ids out. `from engine import LLM, SamplingParams` is its offline face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.api import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM, CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # The front imports this package for its client and its records; torch is only for who asks for a model.
    if name in __all__:
        from engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
