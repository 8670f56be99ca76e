"""How many KV blocks there may be, and how long a context they can hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.config import ConfigError, EngineConfig

MAX_DEFAULT_CPU_BYTES = 2 * 2**30
DEFAULT_CPU_SHARE = 4  # a quarter of what is free


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """num_blocks of the pool; max_model_len that fits it; lowered: less than the model could take."""

    num_blocks: int
    max_model_len: int
    lowered: bool


def plan_memory(config: EngineConfig, *, block_bytes: int, free_bytes: int, model_max_len: int) -> MemoryPlan:
    """Size the pool for `free_bytes` of memory that KV may take, unless the config says it outright.

    One block stays out of the longest context: copying a shared tail needs both blocks for a moment.
    Raises `ConfigError` when the context asked for cannot be held; the model's own context is lowered
    instead.
    """
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        asked = config.kv_memory if isinstance(config.kv_memory, int) else free_bytes
        num_blocks = asked // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            "kv_memory",
            f"expected room for at least 2 blocks of {block_bytes} bytes, there is room for {num_blocks}",
        )
    capacity = (num_blocks - 1) * config.block_size
    wanted = config.max_model_len or model_max_len
    if wanted > model_max_len:
        raise ConfigError("max_model_len", f"expected at most the model's own {model_max_len}, got {wanted}")
    if config.max_model_len is not None and wanted > capacity:
        raise ConfigError(
            "max_model_len",
            f"expected at most {capacity}, which is what {num_blocks} KV blocks hold, got {wanted}; "
            "give kv_memory more, or ask for less",
        )
    return MemoryPlan(num_blocks, min(wanted, capacity), wanted > capacity)


def default_cpu_bytes() -> int:
    """KV memory on a CPU when nobody says how much: bounded, as the machine is there for others too."""
    return min(MAX_DEFAULT_CPU_BYTES, free_memory() // DEFAULT_CPU_SHARE)


def free_memory() -> int:
    """Bytes this process may still take:

    what the machine has free, and no more than its control group allows.
    """
    free = _read_meminfo()
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _read_meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of all memory stands for what is free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
