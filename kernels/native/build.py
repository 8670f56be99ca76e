"""Compiles the C++ beside this file, once a machine, with the machine's own compiler.

The library holds every instruction set the compiler can produce for this processor family; which one runs
is decided when it is loaded. So a cache folder may be shared by different machines, or be filled while an
image is built (`python -m kernels.native`) and used where there is no compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent
_COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"]
_PER_TYPE = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
# Element-wise code rounds where torch rounds; in attention a fused multiply-add is faster and more exact.
_KERNELS = {"attention_tiles": ["-ffp-contract=fast"], "elementwise": ["-ffp-contract=off"]}
_AVX512 = [
    "-mavx2",
    "-mfma",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mprefer-vector-width=512",
]
_X86_ISAS: dict[str, list[str]] = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": _AVX512,
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
}


class BuildError(RuntimeError):
    """There is no library and none could be made; the message says why."""


def cache_root() -> Path:
    """`$PAGETURNER_CACHE`, or the user's cache folder."""
    if chosen := os.environ.get("PAGETURNER_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pageturner"


def library_path(*, rebuild: bool = False) -> Path:
    """The compiled library, which is built first when this source, these flags and this compiler are new.

    rebuild: build it even if there is one. Raises BuildError.
    """
    try:
        folder = cache_root() / "native" / _source_hash()
        compiler = find_compiler()
        if compiler is None:
            built = sorted(folder.glob("*.so"))
            if not built:
                raise BuildError("no C++ compiler found: install g++ or clang++, or name one in $CXX")
            return built[0]
        target = folder / f"{_compiler_hash(compiler)}.so"
        if rebuild or not target.exists():
            _build(compiler, target)
        return target
    except (OSError, RuntimeError) as error:
        raise error if isinstance(error, BuildError) else BuildError(str(error)) from error


def find_compiler() -> list[str] | None:
    """The command that compiles C++, or None."""
    if named := shlex.split(os.environ.get("CXX", "")):
        found = shutil.which(named[0])
        if found is None:
            raise BuildError(f"$CXX names {named[0]!r}, which is not a program on this machine")
        return [found, *named[1:]]
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    return None


def _source_hash() -> str:
    digest = hashlib.sha256(f"{sys.platform} {platform.machine()}".encode())
    for flags in (_COMMON, _PER_TYPE, _KERNELS, _X86_ISAS):
        digest.update(repr(flags).encode())
    for path in sorted(_SOURCES.glob("*.cpp")) + sorted(_SOURCES.glob("*.h")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_hash(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(" ".join(compiler).encode() + version).hexdigest()[:16]


def _build(compiler: list[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    isas = _X86_ISAS if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": []}
    # Inside the cache folder, so that the finished file is moved into place in one step: another process that
    # builds at the same time does the same work, and either result is good.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:

        def compile_one(source: str, name: str, flags: list[str]) -> str:
            """The compiler's complaint; empty when it had none."""
            command = [*compiler, *_COMMON, *flags, "-c", str(_SOURCES / source), "-o", f"{scratch}/{name}.o"]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            return "" if done.returncode == 0 else done.stderr[-2000:] or f"exit status {done.returncode}"

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {
                (isa, kernel): pool.submit(
                    compile_one,
                    f"{kernel}.cpp",
                    f"{kernel}_{isa}",
                    [*_PER_TYPE, *flags, *isa_flags, f"-DPAGETURNER_ISA={isa}"],
                )
                for isa, isa_flags in isas.items()
                for kernel, flags in _KERNELS.items()
            }
            complaints = {key: job.result() for key, job in jobs.items()}
        # An older compiler doesn't know the newest instructions; every one must manage the baseline.
        built = [isa for isa in isas if not any(complaints[isa, kernel] for kernel in _KERNELS)]
        if "baseline" not in built:
            raise BuildError(
                "the C++ compiler failed: "
                + "; ".join(complaints["baseline", k] for k in _KERNELS).strip("; ")
            )
        isa_list = " ".join(f"X({isa})" for isa in built)
        for name in ("runtime", "library"):
            if complaint := compile_one(f"{name}.cpp", name, ["-O2", f"-DPAGETURNER_ISAS={isa_list}"]):
                raise BuildError(f"the C++ compiler failed: {complaint}")
        objects = [f"{scratch}/{kernel}_{isa}.o" for isa in built for kernel in _KERNELS]
        linked = f"{scratch}/library.so"
        done = subprocess.run(
            [*compiler, "-shared", "-o", linked, f"{scratch}/runtime.o", f"{scratch}/library.o", *objects],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"linking failed: {done.stderr[-2000:]}")
        Path(linked).replace(target)
