import random
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.worker import InProcess, Worker


@pytest.fixture
def seed() -> int:
    """Fresh inputs on every run; a failing test shows the seed among its output."""
    value = random.SystemRandom().randrange(2**31)
    print(f"seed: {value}")
    return value


@pytest.fixture(scope="session")
def triton_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def triton_process(triton_device: str) -> Iterator[Worker | InProcess]:
    """Calls that may run Triton kernels: on the GPU, or with the interpreter in a process of its own."""
    worker = InProcess() if triton_device == "cuda" else Worker(interpret=True)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def compile_process() -> Iterator[Worker]:
    """Calls that compile Triton kernels for GPUs that need not be there."""
    worker = Worker(interpret=False)
    yield worker
    worker.close()
