"""Loads the compiled library: its functions, its instruction set, and the OpenMP runtime it shall run on."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.native.build import library_path

# Order of `struct OpenMP` in runtime.cpp.
_OPENMP_ENTRIES = (
    "omp_get_max_threads",
    "omp_in_parallel",
    "GOMP_parallel",
    "__kmpc_fork_call",
    "__kmpc_global_thread_num",
    "__kmpc_push_num_threads",
)


@dataclass(frozen=True, slots=True)
class Features:
    """What runs, and on what.

    isa: the instruction set in use; runnable: all that this CPU and this library have, the slowest first.
    openmp: whether torch's threads are used (otherwise everything runs on the calling thread).
    path: the compiled library.
    """

    isa: str
    runnable: tuple[str, ...]
    openmp: bool
    path: str


class Library:
    """The library as C functions. Each takes one packed record (`*Call` in call.h) and a dtype code."""

    def __init__(self) -> None:
        path = library_path()
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError:
            # A damaged file (a full disk, a crash): make it anew, once.
            path = library_path(rebuild=True)
            self._library = ctypes.CDLL(str(path))
        self.path = path
        self.attention = self._function("pageturner_attention")
        self.write_kv = self._function("pageturner_write_kv")
        self.rms_norm = self._function("pageturner_rms_norm")
        self.rope_write_kv = self._function("pageturner_rope_write_kv")
        self.silu_mul = self._function("pageturner_silu_mul")
        self._library.pageturner_isa_name.restype = ctypes.c_char_p
        self._library.pageturner_supports.argtypes = [ctypes.c_int64]
        names = [self._library.pageturner_isa_name(isa) for isa in range(self._library.pageturner_probe())]
        self._isas = {name.decode(): isa for isa, name in enumerate(names) if name}
        self.openmp = self._use_openmp_of_torch()
        if wanted := os.environ.get("PAGETURNER_NATIVE_ISA"):
            self.choose_isa(wanted)

    def supports_head_dim(self, head_dim: int) -> bool:
        return bool(self._library.pageturner_supports(head_dim))

    def choose_isa(self, name: str) -> None:
        """Use a lower (or again a higher) instruction set than the best. Raises ValueError."""
        if name not in self._isas:
            raise ValueError(
                f"PAGETURNER_NATIVE_ISA must be one this CPU runs, {', '.join(self._isas)}, got {name!r}"
            )
        self._library.pageturner_choose_isa(self._isas[name])

    def features(self) -> Features:
        isa = self._library.pageturner_isa_name(self._library.pageturner_chosen_isa()).decode()
        return Features(isa, tuple(self._isas), self.openmp, str(self.path))

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        function = getattr(self._library, name)
        function.argtypes = [ctypes.c_char_p, ctypes.c_int]
        return function  # type: ignore[no-any-return]  # ctypes finds functions by __getattr__

    def _use_openmp_of_torch(self) -> bool:
        suffix = "dylib" if sys.platform == "darwin" else "so"
        try:
            # A look-up here also finds what torch itself is linked with: exactly the OpenMP it runs on.
            torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
        except OSError:
            return False
        entries = [_address(torch_library, name) for name in _OPENMP_ENTRIES]
        if entries[0] is None or (entries[2] is None and None in entries[3:]):
            return False
        self._library.pageturner_use_openmp((ctypes.c_void_p * len(entries))(*entries))
        return True


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None
