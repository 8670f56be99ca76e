"""What a step takes beside weights and KV, found out by taking the largest one before the pool is sized."""

from __future__ import annotations

import dataclasses

import torch

from cache.layout import KVLayout
from cache.manager import KVCacheManager
from engine.api import EngineInfo, GenerateRequest, SamplingParams
from engine.core import Engine
from engine.model.loader import LoadedModel
from engine.runner import Runner
from engine.scheduler import Scheduler

# Allocators fragment, and kernels not met yet bring workspaces of their own.
MARGIN = 1.25


def rehearse(
    model: LoadedModel, layout: KVLayout, info: EngineInfo, *, max_num_seqs: int, max_tokens: int
) -> int:
    """Take the largest step there can be, and one decode step of as many sequences, on a scratch pool.

    Returns the scratch pool's bytes. Raises `RuntimeError` with the step's own error if it fails.
    """
    length = max_tokens // max_num_seqs
    num_blocks = max_num_seqs * (length // layout.block_size + 1) + 1
    scratch = dataclasses.replace(info, num_blocks=num_blocks, max_model_len=length + 2)
    cache = KVCacheManager(num_blocks, layout.block_size, enable_prefix_caching=False)
    pool = layout.allocate(num_blocks, model.spec.device)
    runner = Runner(
        model, pool, block_size=layout.block_size, max_num_seqs=max_num_seqs, max_model_len=length + 2
    )
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs * length)
    engine = Engine(scratch, cache, scheduler, runner)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    for number in range(max_num_seqs):
        prompt = [(number + position) % info.vocab_size for position in range(length)]
        engine.add_request(GenerateRequest(str(number), prompt, sampling))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"a step of {max_tokens} tokens fails: {output.error}")
    return num_blocks * layout.block_bytes


def gpu_bytes_for_kv(utilization: float, device: torch.device, *, activations: int) -> int:
    """Bytes of a GPU's memory that KV may take:

    the share given to us, less what is in use, less a step's needs.
    """
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free) - int(activations * MARGIN))
