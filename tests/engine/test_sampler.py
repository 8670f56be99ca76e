"""The sampler against a plain reference on small vocabularies, and its promises on seeds and bad rows."""

from __future__ import annotations

import math

import pytest
import torch

from engine.api import SamplingParams
from engine.sampler import INVALID, SamplingState, sample

VOCAB = 12


def draws(logits: torch.Tensor, params: SamplingParams, count: int, seed: int = 1) -> list[int]:
    """`count` tokens from the same logits, by one state that moves on."""
    state = SamplingState(params, seed=seed)
    tokens = []
    for _ in range(count):
        tokens += sample(logits[None], [state])
        state.accept(0)
    return tokens


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution the parameters describe, straight from their definitions, float64 [vocab]."""
    probs = (logits.double() / params.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda token: (-float(probs[token]), token))
    if params.top_k > 0:
        order = order[: params.top_k]
    order = [token for token in order if float(probs[token]) >= params.min_p * float(probs.max())]
    total = sum(float(probs[token]) for token in order)
    kept, before = [], 0.0
    for token in order:
        if before >= params.top_p * total and kept:
            break
        kept.append(token)
        before += float(probs[token])
    result = torch.zeros(len(probs), dtype=torch.float64)
    result[kept] = probs[kept]
    return result / result.sum()


def chi_square_is_plausible(tokens: list[int], expected: torch.Tensor) -> bool:
    """Whether the counts are within five standard deviations of the statistic's mean."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    if bool((counts[expected == 0] > 0).any()):
        return False
    possible = expected > 0
    wanted = expected[possible] * len(tokens)
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    degrees = int(possible.sum()) - 1
    return statistic <= degrees + 5 * math.sqrt(2 * degrees) if degrees else statistic == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05),
        SamplingParams(top_p=0.5, min_p=0.3),
        SamplingParams(top_k=3, top_p=0.999),
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_described_distribution(params: SamplingParams) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    state_tokens = draws(logits, params, 4000)
    assert chi_square_is_plausible(state_tokens, reference(logits, params))


def test_a_wrong_distribution_is_told_apart() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    tokens = draws(logits, SamplingParams(temperature=1.3), 4000)
    assert not chi_square_is_plausible(tokens, reference(logits, SamplingParams()))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.9, min_p=0.5),
        SamplingParams(top_p=0.9, temperature=100.0),
        SamplingParams(top_k=300),
    ],
    ids=str,
)
def test_large_vocabularies_keep_exactly_the_described_tokens(params: SamplingParams) -> None:
    """The shortcut over the likeliest candidates must not show, even where the cut lies far beyond them."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    expected = reference(logits, params)
    cumulative = expected.cumsum(0)
    tokens = draws(logits, params, 300)
    assert all(expected[token] > 0 for token in tokens)
    # Half of the draws fall on either side of the median of the vocabulary, counted in probability.
    below = sum(float(cumulative[token]) < 0.5 for token in tokens)
    assert abs(below - 150) < 5 * math.sqrt(75)


def test_greedy_rows_take_the_first_maximum() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [7.0, 1.0, 2.0, 3.0]])
    states = [SamplingState(SamplingParams(temperature=0)) for _ in range(2)]
    assert sample(logits, states) == [1, 0]


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 10**9])
def test_top_k_of_the_vocabulary_or_more_filters_nothing(top_k: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    tokens = draws(logits, SamplingParams(top_k=top_k), 3000)
    assert chi_square_is_plausible(tokens, reference(logits, SamplingParams()))


def test_top_k_minus_one_is_off() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    assert draws(logits, SamplingParams(top_k=-1), 50) == draws(logits, SamplingParams(), 50)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=0.9999),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=1e-30, top_p=0.5, top_k=5),
    ],
    ids=str,
)
def test_a_filter_that_leaves_one_token_is_greedy(params: SamplingParams) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(4))
    assert set(draws(logits, params, 40)) == {int(logits.argmax())}


def test_a_huge_temperature_is_nearly_uniform() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
    tokens = draws(logits, SamplingParams(temperature=100.0), 4000)
    assert chi_square_is_plausible(tokens, reference(logits, SamplingParams(temperature=100.0)))


def test_ties_at_the_cut_are_settled_by_token_id() -> None:
    logits = torch.zeros(64)
    logits[20:30] = 1.0
    assert set(draws(logits, SamplingParams(top_k=5), 200)) == {20, 21, 22, 23, 24}


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 1000, generator=generator).bfloat16().float()  # rounded: many ties
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=77)
    others = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=700),
        SamplingParams(min_p=0.1),
        SamplingParams(top_p=0.999, temperature=5),
        SamplingParams(top_k=3, presence_penalty=1.0),
    ]
    alone = sample(logits[:1], [SamplingState(params)])
    for place in range(6):
        states = [SamplingState(other) for other in others]
        states.insert(place, SamplingState(params))
        rows = torch.cat([logits[1 : place + 1], logits[:1], logits[place + 1 :]])
        assert sample(rows, states)[place] == alone[0]


@pytest.mark.parametrize("params", [SamplingParams(seed=5), SamplingParams(seed=5, min_p=0.01)], ids=str)
def test_a_row_of_a_large_batch_is_drawn_as_if_alone(params: SamplingParams) -> None:
    logits = torch.randn(9, 50_001, generator=torch.Generator().manual_seed(12))
    together = sample(logits, [SamplingState(params) for _ in range(9)])
    assert together == [sample(row[None], [SamplingState(params)])[0] for row in logits]


def test_an_unaccepted_token_leaves_no_trace() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(9))
    state = SamplingState(SamplingParams(seed=3, presence_penalty=2.0))
    first = sample(logits, [state])
    assert sample(logits, [state]) == first
    assert (state.index, state.penalised) == (0, False)


def test_seeds_and_indices_give_different_draws() -> None:
    logits = torch.zeros(10_000)
    one, two = draws(logits, SamplingParams(seed=1), 30), draws(logits, SamplingParams(seed=2), 30)
    assert one != two
    assert len(set(one)) > 25
    assert one == draws(logits, SamplingParams(seed=1), 30)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_64_bit_seed_works(seed: int) -> None:
    assert 0.0 <= SamplingState(SamplingParams(seed=seed)).uniform() < 1.0


def test_a_request_without_a_seed_gets_its_own() -> None:
    assert SamplingState(SamplingParams()).seed != SamplingState(SamplingParams()).seed
    assert SamplingState(SamplingParams(), seed=4).seed == 4
    assert SamplingState(SamplingParams(seed=5), seed=4).seed == 5


def test_penalties_count_generated_tokens() -> None:
    logits = torch.tensor([[3.0, 2.75, 2.0]])
    state = SamplingState(SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.125))
    answer = []
    left = []
    for _ in range(4):
        answer += sample(logits, [state])
        state.accept(answer[-1])
        counts = torch.tensor([float(answer.count(token)) for token in range(3)])
        left.append((logits[0] - 0.5 * (counts > 0) - 0.125 * counts).argmax().item())
    assert answer == [0, *left[:-1]]
    assert answer == [0, 1, 0, 0]
    assert logits.tolist() == [[3.0, 2.75, 2.0]]


def test_a_negative_penalty_favours_what_was_said() -> None:
    logits = torch.tensor([[1.0, 1.1]])
    state = SamplingState(SamplingParams(temperature=0, presence_penalty=-1.0))
    state.accept(0)
    assert sample(logits, [state]) == [0]


def test_penalties_shape_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.5, 0.0])
    params = SamplingParams(presence_penalty=2.0)
    tokens = []
    for seed in range(3000):
        state = SamplingState(params, seed=seed)
        state.accept(0)
        tokens += sample(logits[None], [state])
    assert chi_square_is_plausible(tokens, reference(logits - torch.tensor([2.0, 0, 0]), SamplingParams()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9, top_k=3)],
    ids=str,
)
def test_unsound_logits_fail_their_own_row_only(bad: float, params: SamplingParams) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(10))
    expected = sample(logits, [SamplingState(params) for _ in range(3)])
    logits[1, 4] = bad
    tokens = sample(logits, [SamplingState(params) for _ in range(3)])
    assert tokens == [expected[0], INVALID, expected[2]]


def test_a_row_without_any_possible_token_is_invalid() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    assert sample(logits, [SamplingState(SamplingParams())]) == [INVALID]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[[2, 7]] = torch.tensor([0.0, -1.0])
    assert set(draws(logits, SamplingParams(temperature=3.0), 100)) == {2, 7}
    assert set(draws(logits, SamplingParams(temperature=3.0, top_p=0.99), 100)) == {2, 7}


def test_nothing_to_sample_is_no_error() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


def test_rows_and_states_must_match() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[1, vocab\]"):
        sample(torch.zeros(2, VOCAB), [SamplingState(SamplingParams())])
