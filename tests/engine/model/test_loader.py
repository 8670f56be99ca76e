"""Reading weights: conversion and its cache, dtypes, end ids, errors."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.model import loader
from engine.model.loader import load_model
from engine.model.source import ModelError, ModelSource, resolve_model
from tests.engine.model.paged import Paged

PathOf = Callable[[str], Path]


def load(path: Path, **arguments: Any) -> loader.LoadedModel:
    return load_model(resolve_model(str(path)), **{"dtype": "float32", "device": "cpu", **arguments})


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: PathOf) -> Path:
    """The tiny Llama as a GGUF file; rows of queries and keys in the order GGUF keeps them in."""
    import gguf

    weights = load_file(tiny_model_path("llama") / "model.safetensors")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(3)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(320)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            if heads:
                weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            new = f"blk.{layer}.{names[part]}.weight"
        else:
            new = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        writer.add_tensor(new, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: loader.LoadedModel) -> torch.Tensor:
    return Paged(model).step({"prompt": list(range(3, 40))})["prompt"]


def test_a_gguf_file_is_converted_once(
    gguf_path: Path, tiny_model_path: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    first = load(gguf_path, cache_dir=tmp_path, progress=lambda stage, share: stages.append(stage))
    assert "converting weights" in stages
    expected = logits(load(tiny_model_path("llama")))
    torch.testing.assert_close(logits(first), expected, rtol=1e-4, atol=1e-4)
    stages.clear()
    second = load(gguf_path, cache_dir=tmp_path, progress=lambda stage, share: stages.append(stage))
    assert set(stages) == {"loading weights"}
    torch.testing.assert_close(logits(second), expected, rtol=1e-4, atol=1e-4)
    assert second.spec == first.spec
    assert second.spec.eos_token_ids == (2,)


def test_damaged_converted_weights_are_converted_again(
    gguf_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(load(gguf_path, cache_dir=tmp_path))
    (entry,) = (tmp_path / "models").iterdir()
    weights = entry / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100:] = bytes(100)
    weights.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        again = load(gguf_path, cache_dir=tmp_path)
    assert "model.safetensors has changed" in caplog.text
    torch.testing.assert_close(logits(again), expected)


def test_each_dtype_and_each_version_of_the_file_has_its_own_entry(gguf_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf_path, copy)
    for dtype in ("float32", "bfloat16"):
        load(copy, cache_dir=tmp_path / "cache", dtype=dtype)
    copy.touch()
    load(copy, cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 3


def test_without_a_place_to_keep_them_weights_are_converted_every_time(
    gguf_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        model = load(gguf_path, cache_dir=tmp_path / "cache")
    assert "cannot be kept" in caplog.text
    assert model.spec.fused


def test_loading_says_nothing_on_the_terminal(
    gguf_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        load(gguf_path, cache_dir=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_progress_runs_from_nothing_to_all(gguf_path: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    load(gguf_path, cache_dir=tmp_path, progress=lambda *what: told.append(what))
    shares = [share for stage, share in told if stage == "converting weights"]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)
    assert len(shares) > 5


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    native: bool, expected: torch.dtype, tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "native_bfloat16", lambda: native)
    assert load(tiny_model_path("llama"), dtype="auto").spec.dtype == expected


@pytest.mark.parametrize("fuse", [True, False])
def test_half_precision_runs_too(fuse: bool, tiny_model_path: PathOf) -> None:
    half = load(tiny_model_path("qwen3"), dtype="float16", fuse=fuse)
    assert half.spec.dtype == torch.float16
    expected = logits(load(tiny_model_path("qwen3")))
    assert float((logits(half) - expected).norm() / expected.norm()) < 0.02


def with_files(tiny: Path, folder: Path, **files: dict[str, Any]) -> Path:
    """A copy of a model with some of its JSON files changed."""
    shutil.copytree(tiny, folder)
    for name, values in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def test_end_ids_come_from_every_place_that_names_some(tiny_model_path: PathOf, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = with_files(
        tiny_model_path("llama"),
        tmp_path / "model",
        generation_config={"eos_token_id": [7, 5]},
        config={"eos_token_id": 9},
    )
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<end>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<end>").save_pretrained(path)
    assert load(path, cache_dir=tmp_path / "cache").spec.eos_token_ids == (2, 5, 7, 9)


def test_pickled_weights_are_refused(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = with_files(tiny_model_path("llama"), tmp_path / "model")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read from"):
        load(path)


def test_a_models_own_code_is_never_run(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = with_files(
        tiny_model_path("llama"),
        tmp_path / "model",
        config={
            "model_type": "mine",
            "auto_map": {"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.C"},
        },
    )
    (path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError):
        load(path)
    assert not (tmp_path / "ran").exists()


def test_a_broken_config_names_the_model(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = with_files(tiny_model_path("llama"), tmp_path / "model")
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="model model: cannot be read from"):
        load(path)


def test_a_broken_gguf_file_names_the_model(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match="model broken: cannot be read from"):
        load(tmp_path / "broken.gguf", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_hub_model_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source = ModelSource("hub", "someone/not-there", None, "someone/not-there", "0")
    with pytest.raises(ModelError, match="someone/not-there: cannot be had from the model hub") as error:
        load_model(source, dtype="float32", device="cpu")
    assert "name a folder or a .gguf file" in str(error.value)


def test_a_model_whose_attention_is_not_ours_is_refused(
    tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason: here attention gives nothing at all."""
    monkeypatch.setattr(
        "engine.model.attention.paged_attention",
        lambda query, kv, batch, scale: torch.zeros_like(query),
    )
    with pytest.raises(ModelError, match="cannot be served exactly"):
        load(tiny_model_path("olmo2"))


def test_fusing_frees_the_models_own_weights(
    tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    recognise = loader.recognise

    def watch(model: Any, shape: Any) -> Any:
        models.append(model)
        return recognise(model, shape)

    monkeypatch.setattr(loader, "recognise", watch)
    load(tiny_model_path("qwen2"))
    left = {name for name, weight in models[0].named_parameters() if weight.ndim == 2 and weight.numel()}
    assert left == {"model.embed_tokens.weight"}
