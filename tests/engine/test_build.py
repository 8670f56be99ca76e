"""Putting an engine together around a real, tiny model."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.layout import KVLayout
from engine.build import CPU_STEP_TOKENS, assemble_engine, build_engine
from engine.config import ConfigError, EngineConfig
from engine.model.loader import LoadedModel, load_model
from engine.model.source import ModelError, resolve_model
from engine.rehearsal import MARGIN, gpu_bytes_for_kv, rehearse
from tests.engine.support import request, run_to_end


@pytest.fixture(scope="module")
def model(tiny_model_path: Callable[[str], Path]) -> LoadedModel:
    return load_model(resolve_model(str(tiny_model_path("llama"))), dtype="float32", device="cpu")


def test_the_info_says_what_was_built(model: LoadedModel) -> None:
    engine = assemble_engine(EngineConfig(num_blocks=20, served_model_name="mine"), model)
    info = engine.info
    assert (info.model, info.num_blocks, info.block_size) == ("mine", 20, 16)
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.block_bytes == engine.runner.pool[0].nbytes
    assert info.vocab_size == model.spec.vocab_size
    assert engine.scheduler.max_num_batched_tokens == CPU_STEP_TOKENS
    assert len(run_to_end(engine, request("a", [1, 2, 3], 4))["a"].token_ids) == 4


def test_every_engine_has_an_id_of_its_own(model: LoadedModel) -> None:
    config = EngineConfig(num_blocks=20)
    assert assemble_engine(config, model).info.boot_id != assemble_engine(config, model).info.boot_id


def test_a_context_lowered_to_the_pool_is_said_aloud(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = assemble_engine(EngineConfig(num_blocks=5), model)
    assert engine.info.max_model_len == 64
    assert "limited to 64 tokens" in caplog.text


def test_a_step_holds_a_token_of_every_sequence_however_many(model: LoadedModel) -> None:
    engine = assemble_engine(EngineConfig(num_blocks=20, max_num_seqs=CPU_STEP_TOKENS + 1), model)
    assert engine.scheduler.max_num_batched_tokens == CPU_STEP_TOKENS + 1


def test_progress_is_told_while_an_engine_is_built(tiny_model_path: Callable[[str], Path]) -> None:
    told: list[tuple[str, float]] = []
    config = EngineConfig(model=str(tiny_model_path("llama")), device="cpu", num_blocks=20)
    build_engine(config, lambda stage, share: told.append((stage, share)))
    assert {"finding the model", "allocating KV memory"} < {stage for stage, _ in told}


def test_a_device_this_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^device: "):
        build_engine(EngineConfig(device="cuda"))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match="/no/such"):
        build_engine(EngineConfig(model="/no/such.gguf", device="cpu"))


def layout(model: LoadedModel) -> KVLayout:
    spec = model.spec
    return KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, 16, spec.dtype)


def test_a_rehearsal_takes_the_largest_step_there_can_be(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    forward = LoadedModel.forward

    def noted(self: LoadedModel, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = forward(self, token_ids, *rest)
        sizes.append((len(token_ids), len(logits)))
        return logits

    monkeypatch.setattr(LoadedModel, "forward", noted)
    info = assemble_engine(EngineConfig(num_blocks=20), model).info
    scratch = rehearse(model, layout(model), info, max_num_seqs=4, max_tokens=128)
    assert sizes == [(128, 4), (4, 4)]
    assert scratch >= 4 * 3 * layout(model).block_bytes


def test_a_rehearsal_that_fails_says_why(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise MemoryError("too large")

    monkeypatch.setattr(LoadedModel, "forward", fail)
    info = assemble_engine(EngineConfig(num_blocks=20), model).info
    with pytest.raises(RuntimeError, match="a step of 128 tokens fails: MemoryError: too large"):
        rehearse(model, layout(model), info, max_num_seqs=4, max_tokens=128)


def test_a_gpus_kv_is_what_its_share_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    device = torch.device("cuda")
    assert gpu_bytes_for_kv(0.9, device, activations=100) == 900 - 300 - int(100 * MARGIN)
    assert gpu_bytes_for_kv(0.2, device, activations=0) == 0
