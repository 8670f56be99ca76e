"""Tiny random models, built from configs of transformers and saved as folders."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True)
class Tiny:
    """An architecture: its config class, what differs from `SIZE`, and whether it is fused."""

    config: str
    values: dict[str, Any] = field(default_factory=dict)
    fused: bool = False


TINY = {
    "llama": Tiny("LlamaConfig", fused=True),
    "llama-tied": Tiny("LlamaConfig", {"tie_word_embeddings": True}, fused=True),
    "llama-biases": Tiny("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, fused=True),
    "llama-one-kv-head": Tiny("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 24}, fused=True),
    "llama-3-rope": Tiny(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        fused=True,
    ),
    "mistral": Tiny("MistralConfig", {"sliding_window": None, "head_dim": 32}, fused=True),
    "qwen2": Tiny("Qwen2Config", fused=True),
    "qwen3": Tiny("Qwen3Config", {"head_dim": 32}, fused=True),
    "phi3": Tiny("Phi3Config", {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}, fused=True),
    "gemma": Tiny("GemmaConfig", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
    "olmo2": Tiny("Olmo2Config"),
    "granite": Tiny(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
        },
    ),
    "mixtral": Tiny("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": Tiny("GPT2Config"),
}


def save_tiny(name: str, folder: Path) -> None:
    """Write the model called `name`: random, but the same every time."""
    tiny = TINY[name]
    save_random(tiny.config, tiny.values, folder)


def save_random(config_class: str, values: dict[str, Any], folder: Path) -> None:
    """Write a model of any config class of transformers, `SIZE` changed by `values`."""
    import transformers

    config = getattr(transformers, config_class)(**{**SIZE, **values})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Every weight counts: norms are not one and biases not zero, so that leaving one out would show."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_(1.0 + 0.3 * noise if parameter.mean() > 0.5 else 0.3 * noise)
        else:
            parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
