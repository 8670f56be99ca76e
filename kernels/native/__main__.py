"""`python -m kernels.native`: compile the kernels ahead of their first use and say what this CPU will run."""

from __future__ import annotations

import sys

from kernels import native


def main() -> int:
    if not native.available():
        return 1
    found = native.features()
    isas = ", ".join(found.runnable)
    print(f"{found.isa} (of {isas}), on torch's threads: {found.openmp}, {found.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
