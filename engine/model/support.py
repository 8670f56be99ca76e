"""Which models can be served exactly, judged from the config before any weight is read."""

from __future__ import annotations

from typing import Any

from engine.model.source import ModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(ModelError):
    """A model whose answers would not be the model's own. The message names the config field."""


def check_config(config: Any, max_model_len: int | None) -> int:
    """The longest context that can be served exactly.

    max_model_len: the longest context wanted; None is the model's own limit.
    Raises `UnsupportedModel`.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("config.is_encoder_decoder: encoder-decoder models are not supported")
    limit = _own_limit(config)
    length = limit if max_model_len is None else min(limit, max_model_len)

    for name in ("attn_logit_softcapping", "use_bidirectional_attention", "alibi"):
        if getattr(config, name, None):
            raise UnsupportedModel(f"config.{name}={getattr(config, name)!r} is not supported")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModel("config.is_causal=False: only causal decoders are supported")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _LAYER_TYPES:
            raise UnsupportedModel(
                f"config.layer_types holds {layer_type!r}; only full attention is supported"
            )

    window = _sliding_window(config)
    if window is not None and window < length:
        raise UnsupportedModel(
            f"config.sliding_window={window}: layers that see only a window are not supported; "
            f"with max_model_len={window} or less the window never matters"
        )
    for rope in _rope_parameters(config):
        short = _static_rope_limit(config, rope)
        if short < length:
            raise UnsupportedModel(
                f"config.rope_parameters.rope_type={rope['rope_type']!r}: rotation by the context's length "
                f"is not supported; with max_model_len={short} or less it never changes"
            )
    return limit


def _own_limit(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModel("config.max_position_embeddings: expected the longest context, found nothing")


def _sliding_window(config: Any) -> int | None:
    """Tokens a windowed layer sees, its own included; None if there is no such layer."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) else None


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The config's descriptions of rotary positions: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return []
    found = [parameters] if "rope_type" in parameters else list(parameters.values())
    return [rope for rope in found if isinstance(rope, dict)]


def _static_rope_limit(config: Any, rope: dict[str, Any]) -> int:
    """Up to which length of context the rotation of a position is the same for every context."""
    unlimited = 2**62
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return unlimited
    for holder in (rope.get, lambda name: getattr(config, name, None)):
        original = holder("original_max_position_embeddings")
        if isinstance(original, int):
            return original
    return _own_limit(config)
