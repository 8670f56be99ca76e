"""The Hugging Face package that takes the same import name as this room.

`transformers` looks for a distribution called `kernels`. With that one installed beside Pageturner, which of
the two answers to `import kernels` depends on the order of `sys.path`, and the loser fails in obscure ways.
So refuse early.
"""

from __future__ import annotations

from importlib import metadata


class KernelsConflict(RuntimeError):
    """The distribution `kernels` is installed in this environment."""


def ensure_no_conflict() -> None:
    """Raise `KernelsConflict` if the distribution `kernels` is installed. Reads metadata, imports nothing."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise KernelsConflict(
        f"The Hugging Face package 'kernels' ({version}) is installed in this environment. Pageturner has a "
        "package of the same import name, and the two cannot live together: uninstall it (pip uninstall "
        "kernels), or give Pageturner an environment of its own."
    )
