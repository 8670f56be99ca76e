"""The engine's settings: plain values, checked once, importable without torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

DTYPES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting that cannot be used. `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def parse_size(text: str | int) -> int:
    """Bytes in `text`: a number, or a number with a unit ("512MiB", "2GiB", "1.5g"). Raises `ValueError`."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a size such as 2GiB or 500MB, got {text!r}")
    number, unit = match.groups()
    return int(float(number) * (_UNITS | _BINARY_UNITS)[(unit or "").lower()])


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine process is set up. Names and meanings are those of the field's other servers.

    model: a hub id, a folder, or a `.gguf` file; None is the default model.
    served_model_name: the name clients use; None takes the model's own.
    dtype: of weights and KV. "auto" picks what is fastest and sound on the device.
    device: "auto", "cpu", "cuda" or "cuda:1".
    block_size: tokens a KV block holds; a power of two from 8 to 128.
    kv_memory: bytes for KV blocks, or a size such as "2GiB". None: on a GPU what `gpu_memory_utilization`
        leaves, else a quarter of the memory that is free, at most 2 GiB.
    gpu_memory_utilization: the share of the GPU's memory that weights, activations and KV may take together.
    max_num_seqs: requests that run at once.
    max_num_batched_tokens: tokens of one step. Larger steps prefill faster; smaller ones keep running answers
        smooth. None: 512 on a CPU, 8192 on a GPU.
    max_model_len: longest prompt and answer together. None: the model's own, or less if the pool is smaller.
    enable_prefix_caching: keep and reuse KV between requests.
    num_blocks: the pool's size itself, instead of a size in bytes.
    seed: where the seeds of requests without one of their own come from; None draws them afresh.
    threads: CPU threads; None leaves torch's choice.
    check_integrity: audit every block whenever the engine is idle. For hunting faults.
    """

    model: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    kv_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    seed: int | None = None
    threads: int | None = None
    check_integrity: bool = False

    def __post_init__(self) -> None:
        self._check("model", self.model is None or _is_name(self.model), "a hub id, a folder or a .gguf file")
        name = self.served_model_name
        self._check("served_model_name", name is None or _is_name(name), "a name")
        self._check("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        device = isinstance(self.device, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        self._check("device", bool(device), "auto, cpu, cuda or cuda:N")
        self._check("block_size", self.block_size in (8, 16, 32, 64, 128), "8, 16, 32, 64 or 128")
        if self.kv_memory is not None:
            try:
                size = parse_size(self.kv_memory)
            except (TypeError, ValueError):
                size = 0
            self._check("kv_memory", size > 0, "a number of bytes or a size such as 2GiB")
            object.__setattr__(self, "kv_memory", size)
        share = self.gpu_memory_utilization
        self._check(
            "gpu_memory_utilization", _is_number(share) and 0.0 < share <= 1.0, "a share above 0 and up to 1"
        )
        self._check_count("max_num_seqs", self.max_num_seqs)
        for field in ("max_num_batched_tokens", "max_model_len", "num_blocks", "threads"):
            value = getattr(self, field)
            if value is not None:
                self._check_count(field, value)
        # A step must hold one token of every running request, or some would never move.
        budget = self.max_num_batched_tokens
        self._check(
            "max_num_batched_tokens",
            budget is None or budget >= self.max_num_seqs,
            f"at least max_num_seqs ({self.max_num_seqs})",
        )
        self._check("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2")
        self._check("num_blocks", self.num_blocks is None or self.num_blocks >= 2, "at least 2")
        both = self.num_blocks is not None and self.kv_memory is not None
        self._check("num_blocks", not both, "left out when kv_memory is given")
        self._check("seed", self.seed is None or type(self.seed) is int, "a whole number")
        for field in ("enable_prefix_caching", "check_integrity"):
            self._check(field, isinstance(getattr(self, field), bool), "true or false")

    def _check_count(self, field: str, value: int) -> None:
        self._check(field, type(value) is int and value >= 1, "a whole number of at least 1")

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(field, f"expected {expected}, got {getattr(self, field)!r}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """A config from plain values. Raises `ConfigError` for a name that is no setting."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigError(name, f"no such engine setting; there are {', '.join(sorted(known))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
