"""transformers' own words and progress bars while a model loads: silenced, and told to a callback instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is done, 0 to 1."""


@contextlib.contextmanager
def quiet_transformers(progress: Progress | None, stage: str) -> Iterator[None]:
    """No bar and no notice of transformers' reaches the terminal; `progress` is told of `stage` instead."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    gguf_loader: Any = modeling_gguf_pytorch_utils
    notices: Any = logging

    report = progress or (lambda stage, share: None)
    verbosity, bars = notices.get_verbosity(), notices.is_progress_bar_enabled()
    own_bar = getattr(gguf_loader, "tqdm", None)
    notices.set_verbosity_error()
    notices.disable_progress_bar()
    if own_bar is not None:  # the GGUF reader draws its bar past transformers' switch

        def watched(items: Iterable[Any], **_: Any) -> Iterator[Any]:
            total = len(items)  # type: ignore[arg-type]  # a list of tensors
            for index, item in enumerate(items):
                report(stage, index / max(total, 1))
                yield item

        gguf_loader.tqdm = watched
    report(stage, 0.0)
    try:
        yield
    finally:
        notices.set_verbosity(verbosity)
        if bars:
            notices.enable_progress_bar()
        if own_bar is not None:
            gguf_loader.tqdm = own_bar
    report(stage, 1.0)
