"""Synthetic multi-turn conversations: sizes are given, words come from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = [
    *("river", "stone", "cloud", "paper", "engine", "window", "garden", "signal", "copper", "winter"),
    *("market", "silver", "letter", "bridge", "candle", "forest", "number", "island", "mirror", "kettle"),
]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one run. Words are common English ones: about one token each for most tokenizers."""

    turns: int = 4
    words_in: int = 40
    tokens_out: int = 64
    system_words: int = 200

    def system_prompt(self) -> str:
        """The same for every conversation: servers that share prefixes can share it."""
        return words(random.Random(7), self.system_words)

    def user_texts(self, conversation: int) -> list[str]:
        rng = random.Random(1000 + conversation)
        return [words(rng, self.words_in) for _ in range(self.turns)]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
