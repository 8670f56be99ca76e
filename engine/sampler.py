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
"""How many of the likeliest tokens a top-p row looks at before it sorts the whole vocabulary."""


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
    tokens = torch.where(best.isfinite(), greedy, INVALID)
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    if drawn:
        _draw(logits, best, tokens, drawn, states)
    return [int(token) for token in tokens.tolist()]


def _penalise(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    logits = logits.clone()
    for row, state in enumerate(states):
        if state.penalised:
            ids, amounts = state.penalties()
            index = torch.tensor(ids, device=logits.device)
            logits[row, index] -= torch.tensor(amounts, dtype=logits.dtype, device=logits.device)
    return logits


def _draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    tokens: torch.Tensor,
    drawn: list[int],
    states: Sequence[SamplingState],
) -> None:
    """Put the tokens of the rows in `drawn` into `tokens`, except where the logits are unsound.

    best: [n] the largest logit of each row.
    """
    device = logits.device
    # Rows are grouped by how many candidates they want: their own affair, that no other row changes.
    groups: dict[int, list[int]] = {}
    for row in drawn:
        groups.setdefault(_wanted(states[row].params, logits.shape[1]), []).append(row)
    for wanted, rows in groups.items():
        index = torch.tensor(rows, device=device)
        settings = _Settings([states[row] for row in rows], device)
        highest = best[index]
        sound = highest.isfinite()
        # The maximum goes first, so that a tiny temperature cannot overflow. Unsound rows become uniform.
        scaled = (logits[index] - highest[:, None]) / settings.temperature[:, None]
        scaled = torch.where(sound[:, None], scaled, 0.0)
        probs = scaled.softmax(dim=-1)
        chosen = _draw_any(probs, settings) if wanted == 0 else _draw_best(probs, settings, wanted)
        tokens[index] = torch.where(sound, chosen, INVALID)


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


def _draw_any(probs: torch.Tensor, settings: _Settings) -> torch.Tensor:
    """Draw from all of the vocabulary, [rows, vocab] -> [rows]: no sorting."""
    if settings.any_min_p:
        floor = probs.amax(dim=-1, keepdim=True) * settings.min_p[:, None]
        probs = torch.where(probs >= floor, probs, 0.0)
    return _invert(probs, settings.uniform)


def _draw_best(probs: torch.Tensor, settings: _Settings, wanted: int) -> torch.Tensor:
    """Draw from the likeliest tokens, [rows, vocab] -> [rows].

    The `wanted` best decide unless the top-p cut lies further down; such rows are sorted whole.
    """
    values, ids = _best(probs, wanted)
    floor = values[:, :1] * settings.min_p[:, None]
    limited = settings.top_k > 0
    rank = torch.arange(wanted, device=probs.device)
    kept = torch.where(limited[:, None], rank < settings.top_k[:, None], True) & (values >= floor)
    weights = torch.where(kept, values, 0.0).double()
    cumulative = weights.cumsum(dim=-1)
    if wanted < probs.shape[1]:
        # What top-p is a share of: all that the other filters left, seen or not.
        everything = torch.where(probs >= floor, probs, 0.0).double().sum(dim=-1)
        total = torch.where(limited, cumulative[:, -1], everything)
        enough = limited | ~kept[:, -1] | (cumulative[:, -1] >= settings.top_p * total)
    else:
        total = cumulative[:, -1]
        enough = torch.ones_like(limited)
    # A token stays if the likelier ones have not reached the share yet; the first always does.
    before = cumulative - weights
    weights = torch.where(before < (settings.top_p * total)[:, None], weights, 0.0)
    chosen = ids.gather(1, _invert(weights, settings.uniform)[:, None])[:, 0]
    if not bool(enough.all()):
        rest = (~enough).nonzero()[:, 0]
        chosen[rest] = _draw_best(probs[rest], settings.take(rest), probs.shape[1])
    return chosen


def _best(probs: torch.Tensor, wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `wanted` likeliest tokens and their ids, likeliest first, equal ones by id.

    The order decides which token a draw falls on, so it must not depend on the algorithm that finds them.
    """
    if wanted < probs.shape[1]:
        values, ids = probs.topk(wanted, dim=-1, sorted=False)
        ids, order = ids.sort(dim=-1)
        values = values.gather(1, order)
    else:
        values, ids = probs, torch.arange(wanted, device=probs.device).expand_as(probs)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index at which the running sum of `weights` passes the share `uniform` of it, [rows, n] -> [rows].

    Weights need not add up to one. An index of weight 0 is never the answer.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    passed = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    # Rounding can put the mark on the total itself: then the last index that has any weight is meant.
    last = torch.searchsorted(cumulative, total, right=False)
    return torch.minimum(passed, last)[:, 0]
