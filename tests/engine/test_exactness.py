"""Token for token what transformers' `generate` says, in float32, whatever became of the KV in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.core import Engine
from engine.model.loader import LoadedModel, load_model
from engine.model.source import resolve_model
from engine.tokenizer import load_tokenizer
from tests.engine.exactness import Chain, Turn, ask, make_chains
from tests.engine.support import request, run_to_end

CONVERSATIONS = 20
QUESTIONS = [
    ("What is the capital of France?", "And of Italy?", "Which of the two is larger?"),
    ("Name three colours.", "Name three more.", "Which one is the sky's?"),
    ("What is 2 plus 3?", "And times 4?", "Explain how you got there."),
    ("Write one sentence about the sea.", "Now one about a mountain.", "Join the two."),
    ("Who wrote Hamlet?", "When was that?", "Name another play of his."),
    ("Translate 'good morning' to French.", "And to Spanish?", "Which one is shorter?"),
    ("What do bees make?", "How do they make it?", "Why do people like it?"),
    ("Tell me a fact about the Moon.", "Another one, please.", "Is there water on it?"),
    ("How many days has a week?", "And a year?", "What is a leap year?"),
    ("What is the opposite of hot?", "Of tall?", "Use both words in a sentence."),
    ("Give me a name for a cat.", "And one for a dog.", "Write a line about both."),
    ("What is water made of?", "What is ice?", "At what temperature does it melt?"),
    ("List the primary colours.", "How do I get green?", "And purple?"),
    ("What is a computer?", "What is a program?", "Who writes programs?"),
    ("Where do penguins live?", "What do they eat?", "Can they fly?"),
    ("What is bread made of?", "How long does it bake?", "What goes well with it?"),
    ("Name a planet.", "Which one is the largest?", "Which one is the hottest?"),
    ("What is the largest ocean?", "How deep is it?", "Which countries lie on it?"),
    ("Say hello in a friendly way.", "Now say goodbye.", "Say thank you."),
    ("Why is the sky blue?", "Why is grass green?", "Why is blood red?"),
    ("What is a verb?", "Give me an example.", "And what is a noun?"),
    ("Who was Albert Einstein?", "What is he known for?", "When did he live?"),
    ("What is photosynthesis?", "Where does it happen?", "Why does it matter?"),
    ("Recommend a book.", "What is it about?", "Who wrote it?"),
    ("What is a triangle?", "How many sides has a square?", "And a hexagon?"),
    ("How do I boil an egg?", "How long for a soft one?", "What goes with it?"),
    ("What is gravity?", "Who discovered it?", "Does the Moon have it?"),
    ("What language is spoken in Brazil?", "And in Mexico?", "And in Egypt?"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A model of ours, and what transformers says with the same weights."""

    model: LoadedModel
    chains: list[Chain]
    vocab_size: int

    def engine(self, **settings: Any) -> Engine:
        values: dict[str, Any] = {
            "dtype": "float32",
            "num_blocks": 400,
            "max_model_len": 250,
            "max_num_seqs": 9,
        }
        return assemble_engine(EngineConfig(**(values | settings)), self.model)

    def turns(self, number: int) -> dict[str, Turn]:
        """A turn of every conversation, by the conversation's branch."""
        return {f"chat{index}": chain[number] for index, chain in enumerate(self.chains)}


@pytest.fixture(scope="module", params=["default", "llama", "qwen2", "qwen3", "mistral", "gemma"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param == "default":
        model: LoadedModel = request.getfixturevalue("default_model")
        original = request.getfixturevalue("default_original")
        inputs = _chats(load_tokenizer(request.getfixturevalue("default_source")))
    else:
        find: Callable[[str], Path] = request.getfixturevalue("tiny_model_path")
        folder = find(request.param)
        model = load_model(resolve_model(str(folder)), dtype="float32", device="cpu")
        original = _open_tiny(folder)
        inputs = _random_chats(model.spec.vocab_size)
    chains = make_chains(original, inputs, list(model.spec.eos_token_ids))
    assert len(chains) >= CONVERSATIONS, "too few conversations in which the likeliest token leads clearly"
    return Case(model, chains[:CONVERSATIONS], model.spec.vocab_size)


def _open_tiny(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _chats(tokenizer: Any) -> list[list[list[int]]]:
    """What each turn adds to a conversation in the default model's own format."""
    conversations = []
    for questions in QUESTIONS:
        added = []
        for number, question in enumerate(questions):
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            if number:
                text = "\n" + text  # what follows the end token of the answer before
            added.append(tokenizer.encode(text, add_special_tokens=False))
        conversations.append(added)
    return conversations


def _random_chats(vocab_size: int) -> list[list[list[int]]]:
    rng = random.Random(3)
    return [
        [[rng.randrange(3, vocab_size) for _ in range(rng.randrange(5, 40))] for _ in range(3)]
        for _ in range(2 * CONVERSATIONS)
    ]


def test_cold(case: Case) -> None:
    engine = case.engine(enable_prefix_caching=False)
    for number in range(3):
        for branch, turn in case.turns(number).items():
            assert ask(engine, {branch: turn}, suffix=str(number)) == {branch: 0}


def test_warm_and_with_eight_others_in_the_batch(case: Case) -> None:
    engine = case.engine()
    for number in range(3):
        reused = ask(engine, case.turns(number))
        if number:
            for branch, before in case.turns(number - 1).items():
                assert reused[branch] >= len(before.prompt_ids) + len(before.answer) - 1


def test_in_chunks_of_a_few_tokens(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens=13)
    ask(engine, dict(list(case.turns(2).items())[:9]))


def test_after_preemption(case: Case) -> None:
    engine = case.engine(num_blocks=40, max_num_seqs=5)
    rng = random.Random(2)

    def preempt_someone() -> None:
        if engine.scheduler.running and rng.random() < 0.2:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))

    ask(engine, case.turns(2), before_step=preempt_someone)
    stats = engine.stats()
    assert stats.preemptions > CONVERSATIONS // 2
    assert stats.evicted_blocks > 0, "what was preempted never had to be computed again"


def test_after_a_fork(case: Case) -> None:
    engine = case.engine()
    ask(engine, case.turns(1))
    for branch in case.turns(1):
        engine.cache.fork("default", branch, f"{branch}-fork")
    # The original goes somewhere else first, into the block that both share.
    others = [
        request(f"other-{branch}", [*turn.prompt_ids, *turn.answer, 5, 6, 7], 8, branch=branch)
        for branch, turn in case.turns(1).items()
    ]
    run_to_end(engine, *others)
    reused = ask(engine, {f"{branch}-fork": turn for branch, turn in case.turns(2).items()})
    for branch, before in case.turns(1).items():
        assert reused[f"{branch}-fork"] >= len(before.prompt_ids) + len(before.answer) - 1


def test_after_an_idle_branch_was_reclaimed_and_came_back(case: Case) -> None:
    engine = case.engine(num_blocks=60, max_model_len=240, max_num_seqs=4)
    rng = random.Random(1)
    for first in range(0, CONVERSATIONS, 4):
        few = list(case.turns(1))[first : first + 4]
        ask(engine, {branch: case.turns(1)[branch] for branch in few})
        # Under names of their own, as what has no name would be reclaimed before them.
        flood = [
            request(f"{branch}-{i}", _random_ids(case, rng, 220), 2, branch=f"f{i}", tenant="b")
            for i, branch in enumerate([*few, "more"])
        ]
        run_to_end(engine, *flood)
        assert all(engine.cache.branch("default", branch) is None for branch in few)
        reused = ask(engine, {branch: case.turns(2)[branch] for branch in few}, suffix="back")
        assert set(reused.values()) == {0}
        reused = ask(engine, {branch: case.turns(2)[branch] for branch in few}, suffix="again")
        assert all(reused.values())
    assert engine.stats().evicted_blocks > 0


def _random_ids(case: Case, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(case.vocab_size) for _ in range(count)]
