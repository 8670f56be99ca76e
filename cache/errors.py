"""What can go wrong in the cache, by name."""

from __future__ import annotations


class IntegrityError(AssertionError):
    """The bookkeeping contradicts itself: a bug in this package, never a caller's mistake."""


class OutOfBlocks(RuntimeError):
    """Every block of the pool is in use."""


class BranchRunning(RuntimeError):
    """The branch has a running table, which alone decides where the branch will point."""


def require(condition: bool, text: str) -> None:
    """Raise `IntegrityError(text)` unless the condition holds."""
    if not condition:
        raise IntegrityError(text)
