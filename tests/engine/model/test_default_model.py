"""The default model against transformers, float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model.loader import LoadedModel
from engine.model.source import ModelSource
from engine.tokenizer import load_tokenizer
from tests.engine.model.paged import Paged

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "Why is the sky blue? Answer in detail, and explain what scattering is and why it depends on wavelength.",
]


@pytest.fixture(scope="module")
def tokenizer(default_source: ModelSource) -> Any:
    return load_tokenizer(default_source)


@pytest.fixture(scope="module")
def questions(tokenizer: Any) -> dict[str, list[int]]:
    return {
        question: list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in QUESTIONS
    }


def test_the_spec_says_what_the_file_holds(default_model: LoadedModel) -> None:
    spec = default_model.spec
    assert (spec.num_layers, spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_position_embeddings) == (49152, 8192)
    assert spec.eos_token_ids == (2,)
    assert (spec.name, spec.dtype, spec.fused) == ("smollm2-135m-instruct", torch.float32, True)


def test_logits_are_those_of_transformers(
    default_model: LoadedModel, default_original: Any, questions: dict[str, list[int]]
) -> None:
    paged = Paged(default_model, block_size=16)
    for question, logits in paged.step(questions).items():
        with torch.inference_mode():
            expected = default_original(torch.tensor([questions[question]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_greedy_answers_are_those_of_generate(
    default_model: LoadedModel, default_original: Any, questions: dict[str, list[int]], tokenizer: Any
) -> None:
    answers = Paged(default_model, block_size=16).generate(questions, 16, seed=3)
    for question, ids in questions.items():
        given = torch.tensor([ids])
        expected = default_original.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=16,
            eos_token_id=None,
            pad_token_id=2,
        )
        assert answers[question] == expected[0, len(ids) :].tolist()
    assert "Paris" in tokenizer.decode(answers[QUESTIONS[0]])
