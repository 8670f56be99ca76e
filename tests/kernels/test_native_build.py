"""How the library is made and loaded: cache, compilers, instruction sets, threads."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.library import Library

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    # Children of a test run must say what they have to say as warnings, whatever the run makes of warnings.
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONWARNINGS", "PAGETURNER_NATIVE_ISA")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out.strip(), err


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that two processes filled at the same time; before, it held a damaged library."""
    cache = tmp_path_factory.mktemp("cache")
    compiler = build.find_compiler()
    assert compiler is not None
    library = cache / "native" / build._source_hash() / f"{build._compiler_hash(compiler)}.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    code = "from kernels import native; print(native.available(), native.features().path)"
    for process in [start(code, PAGETURNER_CACHE=str(cache)) for _ in range(2)]:
        assert finish(process)[0] == f"True {library}"
    return cache


@needs_compiler
def test_two_processes_may_build_at_once_and_leave_one_library(shared_cache):
    files = [path for path in shared_cache.rglob("*") if path.is_file()]
    assert [path.suffix for path in files] == [".so"]
    assert not list(shared_cache.rglob("build-*"))


@needs_compiler
def test_a_filled_cache_serves_a_machine_without_a_compiler(shared_cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PAGETURNER_CACHE", str(shared_cache))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert build.library_path().is_relative_to(shared_cache)


def test_without_a_compiler_torch_takes_over_with_one_warning(tmp_path):
    code = """
import torch
from kernels import native
from kernels.attention import pick_backend
print(native.available(), native.available(), native.supports(torch.float32, 64))
print(pick_backend("cpu", torch.float32))
"""
    out, err = finish(start(code, PAGETURNER_CACHE=str(tmp_path), PATH=str(tmp_path), CXX=""))
    assert out.split() == ["False", "False", "False", "torch"]
    warning = "RuntimeWarning: native CPU kernels are not available, torch takes over"
    assert err.count(warning) == 1
    assert "no C++ compiler found" in err


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", r"\$CXX names 'no-such-compiler'"),
        (shutil.which("false") or "", "the C\\+\\+ compiler failed: exit status 1"),
    ],
)
def test_a_compiler_that_does_not_work_is_the_reason_given(monkeypatch, tmp_path, compiler, reason):
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=reason):
        build.library_path()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_the_reason_given(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="Not a directory"):
        build.library_path()


@needs_compiler
def test_the_compiler_of_the_user_is_taken(monkeypatch, tmp_path):
    other = tmp_path / "my compiler"
    other.symlink_to(shutil.which("g++") or shutil.which("c++") or "/bin/false")
    monkeypatch.setenv("CXX", f"'{other}' -pipe")
    assert build.find_compiler() == [str(other), "-pipe"]


@pytest.fixture
def isa_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Loading anew chooses anew, for the whole process: afterwards the best again."""
    yield monkeypatch
    monkeypatch.delenv("PAGETURNER_NATIVE_ISA", raising=False)
    Library()


@needs_compiler
def test_an_environment_variable_chooses_a_lower_instruction_set(isa_variable):
    runnable = Library().features().runnable
    assert "baseline" in runnable
    for isa in runnable:
        isa_variable.setenv("PAGETURNER_NATIVE_ISA", isa)
        assert Library().features().isa == isa


@needs_compiler
def test_an_instruction_set_this_cpu_lacks_is_an_error_that_lists_the_others(isa_variable):
    isa_variable.setenv("PAGETURNER_NATIVE_ISA", "mmx")
    with pytest.raises(
        ValueError, match=r"PAGETURNER_NATIVE_ISA must be one this CPU runs, baseline.*got 'mmx'"
    ):
        Library()


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_kernels_run_on_the_threads_torch_already_has():
    code = """
import os, re, time, torch
from pathlib import Path
from kernels import native
from tests.kernels.cases import make_case, poisoned

torch.set_num_threads(3)
a = torch.randn(700, 700)
a @ a
torch.randn(3_000_000).exp()
case = make_case([(1, 4000)] * 4 + [(100, 500)], seed=1)
native.available()
before = len(os.listdir("/proc/self/task"))

def nanoseconds_on_a_cpu():
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}

time.sleep(0.5)  # torch's threads stop waiting for work and sleep
idle = nanoseconds_on_a_cpu()
for _ in range(50):
    native.paged_attention(case.query, case.kv, case.batch, case.scale, poisoned(case.query))
busy = sum(spent > idle[task] for task, spent in nanoseconds_on_a_cpu().items())
after = len(os.listdir("/proc/self/task"))
maps = Path("/proc/self/maps").read_text()
runtimes = {line.split()[-1] for line in maps.splitlines() if re.search(r"lib(g|i)?omp", line)}
print(native.features().openmp, after - before, busy, len(runtimes))
"""
    assert finish(start(code, OMP_NUM_THREADS="3"))[0] == "True 0 3 1"


@needs_compiler
@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("kernel", sorted(build._KERNELS))
def test_code_for_newer_cpus_shares_no_symbol_that_a_linker_could_merge(kernel, tmp_path):
    compiler = build.find_compiler()
    assert compiler is not None
    source = ROOT / "kernels" / "native" / f"{kernel}.cpp"
    target = tmp_path / "kernel.o"
    # No optimiser: what it would inline stays visible.
    flags = [*build._COMMON, "-DPAGETURNER_ISA=test", "-O0"]
    subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(target)], check=True)
    listing = subprocess.run(
        ["nm", "--defined-only", str(target)], capture_output=True, text=True, check=True
    ).stdout
    shared = [line.split()[-1] for line in listing.splitlines() if not line.split()[-2].islower()]
    assert shared == [f"pageturner_{kernel.removesuffix('_tiles')}_test"]
