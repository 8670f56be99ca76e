"""Every kind of decoder against transformers: tiny random models, chunked prefill, mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.loader import load_model
from engine.model.source import resolve_model
from tests.engine.model.paged import Paged
from tests.engine.model.tiny import TINY

PathOf = Callable[[str], Path]


def prompts(vocab: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(4)
    return {
        f"prompt {length}": torch.randint(3, vocab, (length,), generator=generator).tolist()
        for length in (1, 7, 8, 9, 50, 93)
    }


def original(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


@torch.inference_mode()
def original_logits(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", TINY)
def test_a_decoder_gives_the_logits_of_transformers(name: str, tiny_model_path: PathOf) -> None:
    path = tiny_model_path(name)
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu")
    assert model.spec.fused == TINY[name].fused
    reference = original(path)
    paged = Paged(model)
    given = prompts(320)
    # The first part of each in one batch, the rest in a second one, then a decode step of all.
    paged.step({key: ids[: max(1, len(ids) // 2)] for key, ids in given.items()})
    paged.step({key: ids[max(1, len(ids) // 2) :] for key, ids in given.items() if len(ids) > 1})
    for key, logits in paged.step({key: [5] for key in given}).items():
        expected = original_logits(reference, [*given[key], 5])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_greedy_answers_are_those_of_generate(name: str, tiny_model_path: PathOf) -> None:
    path = tiny_model_path(name)
    model = load_model(resolve_model(str(path)), dtype="float32", device="cpu")
    reference = original(path)
    given = prompts(320)
    answers = Paged(model).generate(given, 20)
    for key, ids in given.items():
        ids_tensor = torch.tensor([ids])
        expected = reference.generate(
            ids_tensor,
            attention_mask=torch.ones_like(ids_tensor),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
            eos_token_id=None,
        )
        assert answers[key] == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if tiny.fused])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_is_unfused(name: str, dtype: Any, tiny_model_path: PathOf) -> None:
    source = resolve_model(str(tiny_model_path(name)))
    fused = load_model(source, dtype=dtype, device="cpu")
    plain = load_model(source, dtype=dtype, device="cpu", fuse=False)
    assert (fused.spec.fused, plain.spec.fused) == (True, False)
    given = prompts(320)
    found, expected = Paged(fused).step(given), Paged(plain).step(given)
    tolerance = 1e-4 if dtype == "float32" else 0.08
    for key in given:
        off = (found[key] - expected[key]).norm() / expected[key].norm()
        assert float(off) < tolerance


def test_the_kv_of_fused_and_unfused_is_the_same(tiny_model_path: PathOf) -> None:
    """Sequences may move between the two: what lies in the blocks means the same to both."""
    source = resolve_model(str(tiny_model_path("qwen3")))
    pools = []
    for fuse in (True, False):
        paged = Paged(load_model(source, dtype="float32", device="cpu", fuse=fuse))
        paged.step({"one": list(range(3, 40))})
        pools.append(paged.pool[paged.tables["one"][:4]])
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fuse", [True, False])
def test_a_step_answers_the_asked_rows_only(fuse: bool, tiny_model_path: PathOf) -> None:
    """In any order, and none at all for a step that only computes KV."""
    source = resolve_model(str(tiny_model_path("llama")))
    paged = Paged(load_model(source, dtype="float32", device="cpu", fuse=fuse))
    tokens, positions, batch = paged.prepare({"a": [5, 6, 7], "b": [8, 9]})

    def rows(wanted: list[int]) -> torch.Tensor:
        return paged.model.forward(
            tokens, positions, batch, paged.pool, torch.tensor(wanted, dtype=torch.int64)
        )

    every = rows([0, 1, 2, 3, 4])
    torch.testing.assert_close(rows([4, 0]), every[[4, 0]])
    assert rows([]).shape == (0, 320)
