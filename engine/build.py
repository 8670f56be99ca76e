"""From settings to an engine that is ready to step."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable

import torch

from cache.layout import KVLayout
from cache.manager import KVCacheManager
from engine.api import EngineInfo
from engine.config import ConfigError, EngineConfig
from engine.core import Engine
from engine.memory import default_cpu_bytes, plan_memory
from engine.model.loader import LoadedModel, load_model
from engine.model.source import resolve_model
from engine.rehearsal import gpu_bytes_for_kv, rehearse
from engine.runner import Runner
from engine.scheduler import Scheduler
from kernels.attention import pick_backend

log = logging.getLogger(__name__)

CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 8192

Report = Callable[[str, float], None]
"""Told a stage's name and the share of it that is done, 0 to 1."""


def build_engine(config: EngineConfig, report: Report | None = None) -> Engine:
    """Load the model and put the engine together.

    Raises `ConfigError` for settings that don't go with this model or machine, and `ModelError` for the
    model.
    """
    tell = report or _tell_nobody
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = _pick_device(config.device)
    tell("finding the model", 0.0)
    model = load_model(
        resolve_model(config.model),
        dtype=config.dtype,  # type: ignore[arg-type]  # one of its names: the config has checked that
        device=device,
        max_model_len=config.max_model_len,
        progress=report,
    )
    return assemble_engine(config, model, report)


def assemble_engine(config: EngineConfig, model: LoadedModel, report: Report | None = None) -> Engine:
    """An engine around a loaded model: size and allocate the pool, and join the parts.

    Raises `ConfigError` for settings that don't go with this model or machine.
    """
    tell = report or _tell_nobody
    spec = model.spec
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, spec.dtype)
    max_tokens = config.max_num_batched_tokens
    if max_tokens is None:
        max_tokens = max(
            config.max_num_seqs, CPU_STEP_TOKENS if spec.device.type == "cpu" else GPU_STEP_TOKENS
        )
    info = EngineInfo(
        boot_id=uuid.uuid4().hex,
        model=config.served_model_name or spec.name,
        max_model_len=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        eos_token_ids=list(spec.eos_token_ids),
        block_size=config.block_size,
        num_blocks=0,
        block_bytes=layout.block_bytes,
        dtype=str(spec.dtype).removeprefix("torch."),
        device=str(spec.device),
        attention_backend=pick_backend(spec.device, spec.dtype),
    )
    free_bytes = default_cpu_bytes()
    if spec.device.type == "cuda":
        tell("measuring a step", 0.0)
        free_bytes = _measure_gpu(config, model, layout, info, max_tokens)
    tell("allocating KV memory", 0.0)
    plan = plan_memory(
        config,
        block_bytes=layout.block_bytes,
        free_bytes=free_bytes,
        model_max_len=spec.max_position_embeddings,
    )
    if plan.lowered:
        log.warning(
            "the context is limited to %d tokens by the KV memory; the model's own limit is %d",
            plan.max_model_len,
            spec.max_position_embeddings,
        )
    pool = layout.allocate(plan.num_blocks, spec.device)
    cache = KVCacheManager(plan.num_blocks, config.block_size, config.enable_prefix_caching)
    info = dataclasses.replace(info, max_model_len=plan.max_model_len, num_blocks=plan.num_blocks)
    runner = Runner(
        model,
        pool,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
    )
    scheduler = Scheduler(cache, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=max_tokens)
    return Engine(info, cache, scheduler, runner, seed=config.seed)


def _tell_nobody(stage: str, fraction: float) -> None:
    pass


def _pick_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "device", f"expected a device of this machine, got {device!r}: no usable GPU was found"
        )
    return device


def _measure_gpu(
    config: EngineConfig, model: LoadedModel, layout: KVLayout, info: EngineInfo, max_tokens: int
) -> int:
    """Bytes for KV on a GPU, after a rehearsal that also compiles what the first request would have to wait
    for.
    """
    device = model.spec.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    scratch = rehearse(model, layout, info, max_num_seqs=config.max_num_seqs, max_tokens=max_tokens)
    activations = torch.cuda.max_memory_allocated(device) - before - scratch
    torch.cuda.empty_cache()
    return gpu_bytes_for_kv(config.gpu_memory_utilization, device, activations=activations)
