"""A second process for kernel calls.

Whether Triton interprets or compiles is settled when it is imported, for the whole process; and a wild
pointer in an interpreted kernel kills the process it runs in. So neither happens in pytest's own. Tensors
travel as shared memory: what a kernel writes is seen by the caller.
"""

import importlib
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch.multiprocessing


class Worker:
    """interpret: run Triton kernels with its interpreter, on CPU tensors."""

    def __init__(self, *, interpret: bool) -> None:
        spawn = torch.multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, mp_context=spawn, initializer=_start, initargs=(interpret,))

    def call(self, module: str, function: str, *args: Any, **kwargs: Any) -> Any:
        return self._executor.submit(_call, module, function, args, kwargs).result()

    def close(self) -> None:
        self._executor.shutdown()


class InProcess:
    """The same interface where a GPU is at hand."""

    def call(self, module: str, function: str, *args: Any, **kwargs: Any) -> Any:
        return _call(module, function, args, kwargs)

    def close(self) -> None:
        pass


def _start(interpret: bool) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # its one effect here: memory nobody has written yet is NaN
    if interpret:
        _teach_bfloat16()


def _teach_bfloat16() -> None:
    """Triton's interpreter keeps bfloat16 as its bits and multiplies matrices of bits; give it the numbers
    instead.
    """
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def numbers(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, numbers(a), numbers(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _call(module: str, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), function)(*args, **kwargs)
