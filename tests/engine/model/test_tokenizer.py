"""The tokenizer comes from the model once and from the cache afterwards, the same one."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine.tokenizer
from engine.model.source import ModelError, ModelSource, resolve_model
from engine.tokenizer import load_tokenizer

CHAT = [
    {"role": "user", "content": "Grüße, 世界! 👋"},
    {"role": "assistant", "content": "Hello\n\n  there"},
    {"role": "user", "content": "<|im_end|> 1234567"},
]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def built(default_source: ModelSource, cache_dir: Path) -> Any:
    return load_tokenizer(default_source, cache_dir=cache_dir)


def ids(tokenizer: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))


def test_the_cached_tokenizer_is_the_models(built: Any, default_source: ModelSource, cache_dir: Path) -> None:
    cached = load_tokenizer(default_source, cache_dir=cache_dir)
    assert cached is not built
    assert ids(cached) == ids(built)
    assert cached.eos_token_id == built.eos_token_id == 2
    assert cached.get_vocab() == built.get_vocab()
    assert cached.decode(ids(cached)) == built.decode(ids(built))


@pytest.mark.usefixtures("built")
def test_the_cached_tokenizer_needs_no_torch(cache_dir: Path) -> None:
    bare = "import sys; from transformers import PreTrainedTokenizerFast; sys.exit('torch' in sys.modules)"
    if subprocess.run([sys.executable, "-c", bare], check=False).returncode:
        pytest.skip("this version of transformers imports torch by itself")
    code = (
        "import sys; from pathlib import Path; from engine.model.source import resolve_model; "
        "from engine.tokenizer import load_tokenizer; "
        f"t = load_tokenizer(resolve_model(None), cache_dir=Path({str(cache_dir)!r})); "
        "t.apply_chat_template([{'role': 'user', 'content': 'hi'}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def save_small_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(folder)


@pytest.fixture
def small_source(tmp_path: Path) -> ModelSource:
    folder = tmp_path / "model"
    save_small_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return resolve_model(str(folder))


def test_a_folders_tokenizer_is_cached_too(small_source: ModelSource, tmp_path: Path) -> None:
    first = load_tokenizer(small_source, cache_dir=tmp_path / "cache")
    second = load_tokenizer(small_source, cache_dir=tmp_path / "cache")
    assert first("a b c")["input_ids"] == second("a b c")["input_ids"] == [1, 2, 0]
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 1


def test_a_tokenizer_that_does_not_survive_saving_is_not_cached(
    small_source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "_same", lambda one, other: False)
    for _ in range(2):
        assert load_tokenizer(small_source, cache_dir=tmp_path / "cache")("a")["input_ids"] == [1]
    assert list((tmp_path / "cache" / "tokenizers").iterdir()) == []


def test_without_a_place_to_cache_it_still_loads(
    small_source: ModelSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(small_source, cache_dir=tmp_path / "cache")("b")["input_ids"] == [2]
    assert "cannot be cached" in caplog.text


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="no tokenizer for"):
        load_tokenizer(resolve_model(str(tmp_path)), cache_dir=tmp_path / "cache")
