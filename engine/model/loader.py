"""From a `ModelSource` to a model that takes steps: read, checked, fused where possible, and proved equal."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from engine.model import attention, probe
from engine.model.fused import FusedDecoder
from engine.model.gguf_header import end_token_ids
from engine.model.linear import native_bfloat16
from engine.model.modules import ModuleDecoder
from engine.model.quiet import Progress, quiet_transformers
from engine.model.recognise import recognise
from engine.model.source import ModelError, ModelSource, default_cache_dir
from engine.model.store import fetch
from engine.model.support import UnsupportedModel, check_config
from engine.tokenizer import load_tokenizer
from kernels.attention import PagedBatch

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the engine needs to know about a model.

    max_position_embeddings: the longest context the model was made for, in tokens.
    eos_token_ids: ids that end an answer. fused: whether the fast decoder runs it.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    name: str
    fused: bool


class Decoder(Protocol):
    """What computes a step."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for steps."""

    spec: ModelSpec
    decoder: Decoder

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """One step: write the KV of all its tokens, and answer the logits of some.

        token_ids, positions: int64 [tokens], the sequences one after another as in `batch`
        pool: [blocks, layers, 2, block_size, kv_heads, head_dim] of the spec's dtype, written in place
        last: int64 [n], the rows of `token_ids` whose logits are wanted
        Returns float32 [n, vocab].
        """
        return self.decoder.forward(token_ids, positions, batch, pool, last)


def load_model(
    source: ModelSource,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    cache_dir: Path | None = None,
    fuse: bool = True,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model and prove it on a few tokens.

    dtype: "auto" is the model's own on a GPU; on a CPU bfloat16 if it multiplies that in hardware, else
    float32. cache_dir: where a GGUF file's weights are kept once converted; None is `default_cache_dir()`.
    fuse: False runs every model through its own modules.
    max_model_len: the longest context that will be asked of it; lets models be served whose windows are
    wider. progress: told what is being done and how much of it.
    Raises `ModelError`; its subclass `UnsupportedModel` for models that cannot be served exactly.
    """
    place = torch.device(device)
    attention.register()
    reader = _Reader(source, dtype, place, cache_dir or default_cache_dir(), progress)
    loaded = _prepare(reader, fuse, max_model_len)
    if loaded is None:
        logger.warning("%s looks like a model to fuse but is none; it runs unfused", source.served_name)
        loaded = _prepare(reader, False, max_model_len)
    assert loaded is not None
    return loaded


def open_original(
    source: ModelSource,
    *,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """The model as transformers runs it, to compare with. Arguments and errors as in `load_model`."""
    return _Reader(source, dtype, torch.device(device), cache_dir or default_cache_dir(), progress).read()


def _prepare(reader: _Reader, fuse: bool, max_model_len: int | None) -> LoadedModel | None:
    """The model, fused if it can be. None: it was recognised, but fused it computes something else."""
    model = reader.read()
    config = model.config.get_text_config()
    limit = check_config(config, max_model_len)
    num_layers, vocab_size, dtype = config.num_hidden_layers, config.vocab_size, model.dtype
    tokens = probe.probe_tokens(vocab_size, model.device)
    expected = probe.original_logits(model, tokens)

    model.set_attn_implementation(attention.NAME)
    decoder: Decoder = ModuleDecoder(model)
    shape = ModuleDecoder(model).shape(num_layers)
    parts = recognise(model, shape) if fuse else None
    spec = ModelSpec(
        num_layers,
        shape.q_heads,
        shape.kv_heads,
        shape.head_dim,
        vocab_size,
        limit,
        _end_ids(model, reader.source, reader.cache_dir),
        dtype,
        model.device,
        reader.source.served_name,
        parts is not None,
    )
    if parts is not None:
        decoder = FusedDecoder(parts, shape)
        del model
    off = probe.difference(probe.paged_logits(decoder, tokens, num_layers, shape, dtype), expected)
    if off > probe.tolerance(dtype):
        if parts is not None:
            return None
        raise UnsupportedModel(
            f"{reader.source.served_name}: with paged attention its logits differ from transformers' own "
            f"by {off:.1%}; it cannot be served exactly"
        )
    return LoadedModel(spec, decoder)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the weights, as often as needed."""

    source: ModelSource
    dtype: DtypeName
    device: torch.device
    cache_dir: Path
    progress: Progress | None

    def read(self) -> Any:
        """The model of transformers, with transformers' own attention, on its device, ready to infer."""
        source = self.source
        if source.kind != "gguf":
            return self._open(source.location, self._chosen_dtype(), use_safetensors=True)
        dtype = self._chosen_dtype() or torch.bfloat16
        version = importlib.metadata.version("transformers")
        name = f"{source.fingerprint}-{str(dtype).removeprefix('torch.')}-{version}"
        converted: list[Any] = []

        def convert(folder: Path) -> None:
            model = self._open(source.location, dtype, gguf_file=source.gguf_file)
            converted.append(model)
            _forget_quantisation(model)
            with quiet_transformers(self.progress, "keeping converted weights"):
                model.save_pretrained(folder)

        try:
            folder = fetch(self.cache_dir / "models" / name, convert)
        except OSError as error:
            logger.warning("converted weights cannot be kept in %s: %s", self.cache_dir, error)
            return (
                converted[0] if converted else self._open(source.location, dtype, gguf_file=source.gguf_file)
            )
        return converted[0] if converted else self._open(str(folder), dtype, use_safetensors=True)

    def _open(self, location: str, dtype: torch.dtype | None, **arguments: Any) -> Any:
        from transformers import AutoModelForCausalLM

        stage = "converting weights" if "gguf_file" in arguments else "loading weights"
        if self.device.type != "cpu":
            arguments["device_map"] = {"": self.device}
        try:
            with quiet_transformers(self.progress, stage):
                model: Any = AutoModelForCausalLM.from_pretrained(
                    location,
                    dtype=dtype or "auto",
                    attn_implementation="eager",
                    trust_remote_code=False,
                    **arguments,
                )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ModelError(self._advice(error)) from error
        if dtype is None and model.dtype == torch.float32:  # "auto" on a GPU, which is built for half of that
            model = model.to(torch.bfloat16)
        return model.eval().requires_grad_(False)

    def _chosen_dtype(self) -> torch.dtype | None:
        """None: whatever the model's files say."""
        if self.dtype != "auto":
            return _DTYPES[self.dtype]
        if self.device.type != "cpu":
            return None
        return torch.bfloat16 if native_bfloat16() else torch.float32

    def _advice(self, error: Exception) -> str:
        source = self.source
        if source.kind != "hub":
            return f"model {source.served_name}: cannot be read from {source.location}: {error}"
        return (
            f"model {source.location}: cannot be had from the model hub ({error}). It must have safetensors "
            "weights and be public, or HF_TOKEN must be set; offline, name a folder or a .gguf file instead"
        )


def _forget_quantisation(model: Any) -> None:
    """The weights are plain by now; transformers would still refuse to save them as such."""
    model.hf_quantizer = None
    for name in ("is_quantized", "quantization_method"):
        if name in vars(model):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def _end_ids(model: Any, source: ModelSource, cache_dir: Path) -> tuple[int, ...]:
    """Every id that ends an answer by any word of the model: its configs, its tokenizer, its GGUF file."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    try:
        tokenizer = load_tokenizer(source, cache_dir=cache_dir)
    except ModelError:  # a bare model still takes token ids
        tokenizer = None
    for holder in (generation, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif isinstance(ids, Iterable):
            found.update(int(token) for token in ids)
    if source.gguf_file:
        found.update(end_token_ids(Path(source.location) / source.gguf_file))
    return tuple(sorted(found))
