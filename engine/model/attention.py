"""Our attention inside any model of transformers, by its `AttentionInterface`.

A model gets all tokens of a step as one packed row, `[1, tokens]`, and builds no mask: which token sees which
is in the `PagedBatch`. It travels beside the model in a context, as not every model hands extra arguments
down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.model.support import UnsupportedModel
from kernels.attention import PagedBatch, paged_attention, write_kv

NAME = "pageturner"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's attention is given: numbers of heads, and the size of each."""

    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(slots=True)
class Step:
    """One forward: its batch and pool, and which layers have asked for attention.

    pool: [blocks, layers, 2, block_size, kv_heads, head_dim]; None only notes the shapes and answers zeros.
    """

    batch: PagedBatch | None
    pool: torch.Tensor | None
    seen: dict[int, LayerShape] = field(default_factory=dict)


_step: ContextVar[Step] = ContextVar("pageturner_step")


@contextlib.contextmanager
def attending(step: Step) -> Iterator[Step]:
    """Inside, every model set to our attention works on this step."""
    token = _step.set(step)
    try:
        yield step
    finally:
        _step.reset(token)


def register() -> None:
    """Make the name known to transformers. Without a mask function of that name, no mask is ever built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in every layer.

    query: [1, q_heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim]
    Returns [1, tokens, q_heads, head_dim]. Raises `UnsupportedModel` if the layer asks for more.
    """
    step = _step.get()
    layer = module.layer_idx
    if step.pool is None or step.batch is None:
        _note_shape(step, layer, query, key, value, attention_mask, kwargs)
        return torch.zeros_like(query.transpose(1, 2)), None
    kv = step.pool[:, layer]  # [blocks, 2, block_size, kv_heads, head_dim]
    write_kv(_by_token(key), _by_token(value), kv, step.batch.slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged_attention(_by_token(query), kv, step.batch, scale=scale)[None], None


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, head_dim] -> [tokens, heads, head_dim], dense"""
    return states[0].transpose(0, 1).contiguous()


def _note_shape(
    step: Step,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    asked: dict[str, Any],
) -> None:
    if attention_mask is not None:
        raise UnsupportedModel(f"layer {layer} brings an attention mask of its own, which is not supported")
    for name, meaning in (
        ("s_aux", "attention sinks"),
        ("softcap", "softcapped scores"),
        ("position_bias", "a position bias"),
        ("head_mask", "a head mask"),
    ):
        if asked.get(name) is not None:
            raise UnsupportedModel(f"layer {layer} asks for {meaning} ({name}), which is not supported")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModel(
            f"layer {layer} has heads of different sizes (query {query.shape[-1]}, key {key.shape[-1]}, "
            f"value {value.shape[-1]}), which is not supported"
        )
    if layer in step.seen:
        raise UnsupportedModel(f"layer {layer} attends more than once a token, which is not supported")
    step.seen[layer] = LayerShape(query.shape[1], key.shape[1], key.shape[3])
