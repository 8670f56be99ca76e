"""Choose the next token of every row of a batch: one call, each row by its own parameters.

The order of the steps is: penalties, temperature, then the filters top-k, min-p and top-p (top-p measures
what the other two left over), then one draw. A draw is the inverse of the cumulative distribution at a number
that depends only on the request's seed and on how many tokens it has generated. So the same seed gives the
same tokens from the same logits, whatever else is in the batch, and also after a preemption.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import Counter
from collections.abc import Sequence

import torch

from engine.api import SamplingParams

INVALID = -1
"""Instead of a token id: the row's logits held NaN or +inf, or nothing but -inf. Only that request failed."""

MIN_TEMPERATURE = 1e-5
"""Below this a draw is greedy in all but name, and dividing by it would leave float32."""

CANDIDATES = 256
"""How many of the likeliest tokens a top-p row looks at first; all are sorted only if it takes all."""

CHUNK = 256
"""Tokens whose weights are summed up before the one that is drawn is looked for among them."""


class SamplingState:
    """The parameters of one request and what it has generated so far.

    `sample` only reads it; whoever keeps a sampled token calls `accept`. A token that is thrown away (its
    step was overtaken by an abort or a preemption) therefore leaves no trace, and the next draw repeats it.

    seed: of a request that brought none in `params`; None draws a fresh one.
    """

    __slots__ = ("_counts", "_index", "params", "seed")

    def __init__(self, params: SamplingParams, *, seed: int | None = None) -> None:
        self.params = params
        if params.seed is not None:
            seed = params.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self._index = 0
        self._counts: Counter[int] = Counter()

    @property
    def index(self) -> int:
        """Tokens accepted so far, i.e. the index of the next one."""
        return self._index

    @property
    def penalised(self) -> bool:
        """Whether the next logits differ from the model's."""
        params = self.params
        return bool(self._counts) and bool(params.presence_penalty or params.frequency_penalty)

    def accept(self, token_id: int) -> None:
        """Count a sampled token as generated."""
        self._index += 1
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._counts[token_id] += 1

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token: a hash of seed and index."""
        digest = hashlib.blake2b(struct.pack("<QQ", self.seed % 2**64, self._index), digest_size=8).digest()
        return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def penalties(self) -> tuple[list[int], list[float]]:
        """Generated token ids and what is taken off the logits of each."""
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        return list(self._counts), [presence + frequency * count for count in self._counts.values()]


@torch.inference_mode()
def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int]:
    """The next token id of each row, or `INVALID`.

    logits: float32 [n, vocab], left as they are; states: one for each row.
    """
    if logits.ndim != 2 or logits.shape[0] != len(states):
        raise ValueError(f"logits must be [{len(states)}, vocab], got {list(logits.shape)}")
    if not states:
        return []
    if any(state.penalised for state in states):
        logits = _penalise(logits, states)
    best, greedy = logits.max(dim=-1)  # NaN wins a maximum, so `best` also tells which rows are sound
    tokens = torch.where(best.isfinite(), greedy, INVALID).tolist()
    # Rows are grouped by how many candidates they want: their own affair, that no other row changes.
    groups: dict[int, list[int]] = {}
    for row, state in enumerate(states):
        if not state.params.greedy and tokens[row] != INVALID:
            groups.setdefault(_wanted(state.params, logits.shape[1]), []).append(row)
    for wanted, rows in groups.items():
        settings = _Settings([states[row] for row in rows], logits.device)
        weights = _weigh(logits, best, rows, settings)
        chosen = _draw_best(weights, settings, wanted) if wanted else _draw_any(weights, settings)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            tokens[row] = token
    return tokens


def _penalise(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    logits = logits.clone()
    for row, state in enumerate(states):
        if state.penalised:
            ids, amounts = state.penalties()
            index = torch.tensor(ids, device=logits.device)
            logits[row, index] -= torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
    return logits


def _weigh(logits: torch.Tensor, best: torch.Tensor, rows: list[int], settings: _Settings) -> torch.Tensor:
    """How likely each token of these rows is against the likeliest one, which weighs 1.

    best: [n], the largest logit of each row. Returns float32 [rows, vocab, and zeros up to a whole CHUNK].
    """
    vocab = logits.shape[1]
    weights = logits.new_zeros(len(rows), -(-vocab // CHUNK) * CHUNK, dtype=torch.float32)
    used = weights[:, :vocab]
    if len(rows) == len(logits):
        torch.sub(logits, best[:, None], out=used)
    else:
        index = torch.tensor(rows, device=logits.device)
        torch.sub(logits[index], best[index, None], out=used)
    # Taking off the maximum first keeps a tiny temperature from overflowing.
    used.div_(settings.temperature[:, None]).exp_()
    return weights


def _wanted(params: SamplingParams, vocab: int) -> int:
    """How many of the likeliest tokens must be known in order; 0 where order does not matter."""
    if params.top_k > 0:
        # A power of two above top_k: few groups, and ties at the border are seen and settled by token id.
        return min(1 << max(params.top_k, 15).bit_length(), vocab)
    return min(CANDIDATES, vocab) if params.top_p < 1.0 else 0


class _Settings:
    """The parameters of some rows as tensors, [rows] each."""

    def __init__(self, states: Sequence[SamplingState], device: torch.device) -> None:
        self.temperature = torch.tensor(
            [max(state.params.temperature, MIN_TEMPERATURE) for state in states], device=device
        )
        self.top_k = torch.tensor([max(state.params.top_k, 0) for state in states], device=device)
        self.min_p = torch.tensor([state.params.min_p for state in states], device=device)
        self.top_p = torch.tensor(
            [state.params.top_p for state in states], dtype=torch.float64, device=device
        )
        self.uniform = torch.tensor([state.uniform() for state in states], dtype=torch.float64, device=device)
        self.any_min_p = any(state.params.min_p for state in states)

    def take(self, rows: torch.Tensor) -> _Settings:
        """The settings of the rows at these indices."""
        part = object.__new__(_Settings)
        for name in ("temperature", "top_k", "min_p", "top_p", "uniform"):
            setattr(part, name, getattr(self, name)[rows])
        part.any_min_p = self.any_min_p
        return part


def _draw_any(weights: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """Draw from all of the vocabulary, [rows, chunks * CHUNK] -> [rows]: no sorting, sums by chunk first."""
    chunks = _above_min_p(weights, settings).view(len(weights), -1, CHUNK)
    sums = chunks.sum(dim=-1)
    chunk, mark = _invert(sums, settings.uniform)
    inside = chunks[torch.arange(len(chunk), device=chunk.device), chunk]  # [rows, CHUNK]
    # What is left of the mark inside the chunk, as a share of it.
    share = mark / sums.gather(1, chunk[:, None])[:, 0]
    return chunk * CHUNK + _invert(inside, share.clamp(0.0, 1.0))[0]


def _draw_best(weights: torch.Tensor, settings: _Settings, wanted: int) -> torch.Tensor:
    """Draw from the likeliest tokens, [rows, vocab] -> [rows].

    The `wanted` best decide unless the top-p cut lies further down; such rows are tried with more of them.
    """
    values, ids = _best(weights, wanted)
    limited = settings.top_k > 0
    rank = torch.arange(wanted, device=weights.device)
    kept = values >= settings.min_p[:, None]
    kept &= ~limited[:, None] | (rank < settings.top_k[:, None])
    best = torch.where(kept, values, 0.0).double()
    cumulative = best.cumsum(dim=-1)
    everything = wanted == weights.shape[1]
    # What top-p is a share of: all that the other filters left, seen or not.
    total = cumulative[:, -1]
    if not everything:
        total = torch.where(limited, total, _above_min_p(weights, settings).sum(dim=-1).double())
    goal = settings.top_p * total
    # A token stays if the likelier ones have not reached the goal yet; the first always does.
    chosen, _ = _invert(torch.where(cumulative - best < goal[:, None], best, 0.0), settings.uniform)
    chosen = ids.gather(1, chosen[:, None])[:, 0]
    enough = limited | ~kept[:, -1] | (cumulative[:, -1] >= goal)
    if not everything and not bool(enough.all()):
        rest = (~enough).nonzero()[:, 0]
        more = min(wanted * 16, weights.shape[1])
        chosen[rest] = _draw_best(weights[rest], settings.take(rest), more)
    return chosen


def _above_min_p(weights: torch.Tensor, settings: _Settings) -> torch.Tensor:
    if not settings.any_min_p:
        return weights
    return torch.where(weights >= settings.min_p[:, None], weights, 0.0)


def _best(weights: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `wanted` likeliest tokens' weights and their ids, likeliest first, equal ones by id.

    The order decides which token a draw falls on, so it must not depend on the algorithm that finds them.
    """
    if wanted < weights.shape[1]:
        values, ids = weights.topk(wanted, dim=-1, sorted=False)
        ids, order = ids.sort(dim=-1)
        values = values.gather(1, order)
    else:
        values, ids = weights, torch.arange(wanted, device=weights.device).expand_as(weights)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of `weights` [rows, n] passes the share `uniform` [rows] of the whole sum.

    Returns the index, int64 [rows], never one of weight 0; and how far into it, float64 [rows].
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    mark = uniform[:, None] * total
    passed = torch.searchsorted(cumulative, mark, right=True)
    # Rounding can put the mark on the total itself: then the last index that has any weight is meant.
    passed = torch.minimum(passed, torch.searchsorted(cumulative, total, right=False))
    before = cumulative.gather(1, passed) - weights.gather(1, passed)
    return passed[:, 0], (mark - before)[:, 0]
