"""The model's tokenizer, without torch wherever that is possible."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

from engine.model.gguf_header import end_token_ids
from engine.model.source import ModelError, ModelSource, default_cache_dir
from engine.model.store import fetch

logger = logging.getLogger(__name__)


def load_tokenizer(source: ModelSource, *, cache_dir: Path | None = None) -> Any:
    """A fast tokenizer of transformers with the model's chat template.

    A GGUF file or a folder is asked once; afterwards the tokenizer comes from the cache, in a fraction of the
    time and without importing torch. cache_dir: None is `default_cache_dir()`. Raises `ModelError`.
    """
    if source.kind == "hub":
        return _build(source)
    version = importlib.metadata.version("transformers")
    folder = (cache_dir or default_cache_dir()) / "tokenizers" / f"{source.fingerprint}-{version}"
    built: list[Any] = []

    def build(target: Path) -> None:
        tokenizer = _build(source)
        built.append(tokenizer)
        tokenizer.save_pretrained(target)
        if not _same(tokenizer, _read(target)):
            raise _NotPortable

    try:
        kept = fetch(folder, build)
    except _NotPortable:
        return built[0]
    except OSError as error:
        logger.warning("the tokenizer cannot be cached in %s: %s", folder.parent, error)
        return built[0] if built else _build(source)
    return built[0] if built else _read(kept)


class _NotPortable(Exception):
    """A tokenizer that needs its own class: saving it and reading it plainly gives another one."""


def _build(source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    arguments = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, trust_remote_code=False, **arguments)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"no tokenizer for {source.served_name} from {source.location}: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {source.served_name} has no fast version (a tokenizer.json)")
    if source.gguf_file:
        # transformers before 5.24 takes another token for the end of the text.
        for end_id in end_token_ids(Path(source.location) / source.gguf_file)[:1]:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_id)
    return tokenizer


def _read(folder: Path) -> Any:
    # Not AutoTokenizer: it would look at every model class, and import torch to do so.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def _same(one: Any, other: Any) -> bool:
    return bool(
        one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
        and one.chat_template == other.chat_template
        and one.special_tokens_map == other.special_tokens_map
    )
