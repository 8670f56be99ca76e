"""`kernels` costs nothing to import, and `transformers` does not take it for its own optional package."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "transformers", "numpy")


def modules_after(code):
    """Names of all modules a fresh interpreter has imported after running `code`."""
    report = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def roots(names):
    return {name.partition(".")[0] for name in names}


def test_importing_the_package_brings_nothing_else():
    assert modules_after("import kernels") - modules_after("import json") == {"kernels"}


def test_importing_attention_brings_torch_only():
    modules = modules_after("import kernels.attention, kernels.blocks, kernels.reference, kernels.check")
    assert {"kernels.attention", "kernels.blocks", "kernels.reference"} <= modules
    assert roots(modules) & {"triton", "transformers"} == set()
    assert {name for name in modules if name.startswith(("kernels.triton", "kernels.native"))} == set()


def test_looking_for_the_conflict_brings_nothing_heavy():
    modules = modules_after("from kernels.conflict import ensure_no_conflict; ensure_no_conflict()")
    assert roots(modules) & set(HEAVY) == set()


def test_transformers_lives_beside_it():
    code = """
import kernels
import transformers
from transformers.utils import is_kernels_available
from transformers import LlamaForCausalLM
assert not is_kernels_available()
"""
    modules = modules_after(code)
    assert "transformers.models.llama.modeling_llama" in modules
    assert {name for name in modules if name.startswith("kernels.")} == set()
