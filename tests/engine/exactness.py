"""Conversations whose every token transformers' `generate` has fixed, and the same ones through the
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.api import GenerateRequest, SamplingParams
from engine.core import Engine
from tests.engine.support import run_to_end

ANSWER_TOKENS = 24
CLEAR_LEAD = 2e-3
"""How far the likeliest token must lead everywhere in a chain:

more than the order of float32 sums can move.
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """prompt_ids:

    the whole context, exact ids of earlier turns included. answer: what `generate` says to it.
    """

    prompt_ids: list[int]
    answer: list[int]


Chain = list[Turn]


def make_chains(model: Any, added: list[list[list[int]]], eos_token_ids: list[int]) -> list[Chain]:
    """Let `generate` answer conversations, given as the ids that every turn adds; those that lead clearly.

    model: of transformers, float32. All conversations go through `generate` at once, padded on the left: that
    moves its sums about as much as our batches move ours.
    """
    contexts: list[list[int]] = [[] for _ in added]
    chains: list[Chain] = [[] for _ in added]
    leads = [float("inf")] * len(added)
    for number in range(len(added[0])):
        contexts = [context + turns[number] for context, turns in zip(contexts, added, strict=True)]
        width = max(map(len, contexts))
        output = model.generate(
            torch.tensor([[0] * (width - len(context)) + context for context in contexts]),
            attention_mask=torch.tensor(
                [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
            ),
            do_sample=False,
            max_new_tokens=ANSWER_TOKENS,
            eos_token_id=eos_token_ids,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(output.logits, dim=1).topk(2).values  # [conversations, steps, 2]
        for index, sampled in enumerate(output.sequences[:, width:].tolist()):
            ends = [step for step, token in enumerate(sampled) if token in eos_token_ids]
            answer = sampled[: ends[0] + 1] if ends else sampled
            gaps = best[index, : len(answer), 0] - best[index, : len(answer), 1]
            leads[index] = min(leads[index], float(gaps.min()))
            chains[index].append(Turn(contexts[index], answer))
            contexts[index] = contexts[index] + answer
    return [chain for chain, lead in zip(chains, leads, strict=True) if lead >= CLEAR_LEAD]


def ask(
    engine: Engine,
    turns: dict[str, Turn],
    *,
    suffix: str = "",
    before_step: Callable[[], None] | None = None,
) -> dict[str, int]:
    """Run these turns at once, each on the branch it is named by, and hold every token against `generate`.

    Returns how many prompt tokens of each were reused.
    """
    requests = [
        GenerateRequest(
            branch + suffix,
            turn.prompt_ids,
            SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS),
            branch=branch,
        )
        for branch, turn in turns.items()
    ]
    transcripts = run_to_end(engine, *requests, before_step=before_step)
    reused: dict[str, int] = {}
    for branch, turn in turns.items():
        transcript = transcripts[branch + suffix]
        assert transcript.token_ids == turn.answer, f"{branch}: {transcript.token_ids} is not {turn.answer}"
        assert transcript.last is not None
        assert transcript.last.prompt is not None
        assert transcript.last.prompt.total == len(turn.prompt_ids)
        reused[branch] = transcript.last.prompt.reused
    return reused
